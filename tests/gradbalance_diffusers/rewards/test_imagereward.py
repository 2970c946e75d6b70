from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertTokenizer, BlipTextModel, BlipVisionModel

from blip_reference import ImageRewardReference, randomize
from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards import ImageReward, Reward, RewardSet, make_reward
from gradbalance_diffusers.rewards.blip_keys import IGNORED, blip_configs, to_transformers
from gradbalance_diffusers.rewards.imagereward_model import ImageRewardModel
from gradbalance_diffusers.rewards.images import resized_with_pil

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "red", "cat", "##s", ",", '"']
HEADS = {"vision_heads": 4, "text_heads": 2}
FILE = Path("ImageReward.pt")


def small(seed: int = 0) -> ImageRewardReference:
    """2 and 3 layers, 12x12 pictures in patches of 4, two token ids more than the tokenizer has, random weights."""
    model = ImageRewardReference(vision=(2, 32, 4, 40, 3, 4), text=(3, 24, 2, 28), vocabulary=len(WORDS) + 2, length=48)
    randomize(model, seed)
    return model.eval()


@pytest.fixture(scope="module")
def reference() -> ImageRewardReference:
    return small()


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})


@pytest.fixture(scope="module")
def tokenizer_path(tokenizer: BertTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def path(reference: ImageRewardReference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights as they are published."""
    folder = tmp_path_factory.mktemp("imagereward")
    torch.save(reference.state_dict(), folder / "ImageReward.pt")
    return folder


@pytest.fixture(scope="module")
def build(path: Path, tokenizer_path: Path) -> Callable[..., ImageReward]:
    def make(**options: Any) -> ImageReward:
        reward = make_reward(
            "imagereward", **{"path": path, "tokenizer": tokenizer_path, "device": "cpu", **HEADS} | options
        )
        assert isinstance(reward, ImageReward)
        return reward

    return make


def converted(model: ImageRewardReference, dtype: torch.dtype = torch.float64) -> ImageRewardModel:
    return ImageRewardModel.from_state(model.state_dict(), FILE, dtype=dtype, **HEADS).eval()


@pytest.mark.parametrize("seed", range(3))
def test_the_conversion_equals_the_plain_network(seed: int) -> None:
    model = small(seed).double()
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(4, 3, 12, 12, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, len(WORDS), (4, 35), generator=generator)
    mask = (torch.arange(35) < torch.tensor([35, 1, 7, 20])[:, None]).long()
    with torch.no_grad():
        expected, found = model(pixels, ids, mask), converted(model)(pixels, ids, mask)
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_every_tensor_is_used(reference: ImageRewardReference) -> None:
    """The score has a derivative by each, and does not change with those that are left out by name."""
    state = {name: tensor.double() for name, tensor in reference.state_dict().items() if tensor.is_floating_point()}
    pixels = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.arange(2, 37)[None]
    model = ImageRewardModel.from_state(state, FILE, dtype=torch.float64, **HEADS).eval()
    score = model(pixels, ids, torch.ones_like(ids)).sum()
    gradients = torch.autograd.grad(score, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    still = {name for name, gradient in zip(names, gradients, strict=True) if gradient.abs().max() < 1e-12}
    # A bias of the keys shifts all logits of a query alike, which softmax does not see.
    assert still == {name for name in names if name.endswith("self.key.bias")}
    changed = {name: tensor + 1 if name in IGNORED else tensor for name, tensor in state.items()}
    again = ImageRewardModel.from_state(changed, FILE, dtype=torch.float64, **HEADS).eval()
    assert torch.equal(again(pixels, ids, torch.ones_like(ids)).sum(), score)


def test_names_and_shapes_of_the_published_model() -> None:
    """Built without memory: ViT-L/16 at 224 pixels and BERT-base with 30524 tokens, 1.79 GB as published."""
    with torch.device("meta"):
        published = ImageRewardReference(
            vision=(24, 1024, 16, 4096, 14, 16), text=(12, 768, 12, 3072), vocabulary=30524
        )
        state = published.state_dict()
        vision, text = blip_configs(state, vision_heads=16, text_heads=12)
        models = {"vision": BlipVisionModel(vision), "text": BlipTextModel(text, add_pooling_layer=False)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert 0 < 1_786_880_927 - size < 1_000_000  # the rest of the published file is names and padding
    assert vision.image_size == 224
    for part, model in models.items():
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        assert {name: tensor.shape for name, tensor in to_transformers(state, FILE)[part].items()} == expected


def test_scores_through_the_public_entry(
    build: Callable[..., ImageReward],
    reference: ImageRewardReference,
    tokenizer: BertTokenizer,
    pictures: Tensor,
) -> None:
    prompts = ["red cats", "Red cats", "a", "b, " * 40, '"x"']
    pixels = resized_with_pil(pictures, 12)
    found = build(batch_size=2)(pictures, prompts, source=[None] * 5)
    expected = []
    for i, prompt in enumerate(prompts):  # one by one, with the ids written out
        words = {"red cats": ["red", "cat", "##s"], "a": ["a"], '"x"': ['"', "x", '"']}.get(
            prompt.lower(), ["b", ","] * 40
        )
        ids = torch.tensor([[WORDS.index(word) for word in ["[CLS]", *words[:33], "[SEP]"]]])
        with torch.no_grad():
            expected.append(reference(pixels[i : i + 1], ids, torch.ones_like(ids)).item())
    assert found == pytest.approx(expected, abs=1e-5)
    assert build()(pictures[:1].expand(5, -1, -1, -1), prompts)[0] != pytest.approx(found[1:], abs=1e-3)
    assert isinstance(build(), Reward)


def test_each_picture_is_scored_for_its_own_prompt(build: Callable[..., ImageReward], pictures: Tensor) -> None:
    reward = build()
    prompts = ["red", "cat", "a b", "c", "d"]
    together = reward(pictures, prompts)
    assert together == pytest.approx([reward(pictures[i : i + 1], [prompts[i]])[0] for i in range(5)], abs=1e-5)
    assert reward(pictures[:1], ["cat"]) != pytest.approx(together[:1], abs=1e-3)
    assert reward(pictures[1:2], ["red"]) != pytest.approx(together[:1], abs=1e-3)


def test_lower_precision(build: Callable[..., ImageReward], pictures: Tensor) -> None:
    exact, rounded = build(), build(dtype="bfloat16")
    assert {p.dtype for p in rounded._model.vision.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in rounded._model.head.parameters()} == {torch.float32}
    prompts = ["red"] * 5
    assert rounded(pictures, prompts) == pytest.approx(exact(pictures, prompts), abs=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exact(pictures, prompts) == build()(pictures, prompts)


def test_in_a_reward_set_with_shared_weights(build: Callable[..., ImageReward], pictures: Tensor) -> None:
    one, two = build(), build()
    assert one._model is two._model
    assert build(dtype="bfloat16")._model is not one._model
    table = RewardSet({"training": one, "evaluation": two}, workers=2)(pictures, ["red"] * 5)
    assert torch.equal(table.values[:, 0], table.values[:, 1])
    assert table.mask.all()


def test_safetensors_and_a_state_dict_entry(
    build: Callable[..., ImageReward], reference: ImageRewardReference, pictures: Tensor, tmp_path: Path
) -> None:
    state = reference.state_dict()
    save_file(state, tmp_path / "reward.safetensors")
    torch.save({"state_dict": {k: v for k, v in state.items() if k not in IGNORED}}, tmp_path / "bare.pt")
    expected = build()(pictures, ["red"] * 5)
    for file in ("reward.safetensors", "bare.pt"):
        assert build(path=tmp_path / file)(pictures, ["red"] * 5) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp.layers.4.bias": None}, r"1 missing \(mlp.layers.4.bias\) and 0 unknown"),
        ({"blip.itm_head.weight": torch.ones(2, 2)}, r"0 missing and 1 unknown \(blip.itm_head.weight\)"),
        ({"blip.visual_encoder.blocks.1.attn.qkv.bias": None}, r"blocks.1.attn.qkv.bias"),
        ({"mlp.layers.0.weight": torch.ones(1024, 7)}, "must hold an ImageReward whose tensors fit each other"),
        ({"blip.visual_encoder.norm.weight": torch.ones(7)}, "must hold an ImageReward whose tensors fit each other"),
    ],
)
def test_checkpoints_that_do_not_fit(
    build: Callable[..., ImageReward],
    reference: ImageRewardReference,
    tmp_path: Path,
    change: dict[str, Tensor | None],
    message: str,
) -> None:
    state = {name: tensor for name, tensor in (reference.state_dict() | change).items() if tensor is not None}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(InvalidArgumentError, match=message):
        build(path=tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vision_heads": 5}, "`vision_heads` must divide the width 32"),
        ({"text_heads": 0}, "`text_heads` must divide the width 24"),
        ({"path": "/no/such/file"}, "`path`"),
        ({"tokenizer": "/no/such/folder"}, "`tokenizer`"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_options(build: Callable[..., ImageReward], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        build(**options)


def test_the_tokenizer_of_another_model(
    build: Callable[..., ImageReward], clip_path: Path, tokenizer: BertTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`tokenizer` must be that of BERT.*74 tokens"):
        build(tokenizer=clip_path)
    longer = BertTokenizer(vocab={word: i for i, word in enumerate([*WORDS, "x1", "x2", "x3"])})
    longer.save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match=f"at most the {len(WORDS) + 2} tokens .*{len(WORDS) + 3} tokens"):
        build(tokenizer=tmp_path)
