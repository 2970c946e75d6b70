import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.open_clip_keys import clip_config, to_transformers
from open_clip_reference import OpenCLIP, randomize

FILE = Path("weights.pt")
END = 29


def build() -> OpenCLIP:
    model = OpenCLIP(
        vision=(3, 48, 3, 40),
        text=(2, 32, 4, 56),
        grid=3,
        patch=4,
        vocabulary=END + 1,
        length=10,
        dimension=24,
    )
    randomize(model)
    return model.double().eval()


def convert(model: OpenCLIP, *, heads: tuple[int, int] = (3, 4)) -> CLIPModel:
    state = model.state_dict()
    config = clip_config(state, vision_heads=heads[0], text_heads=heads[1], eos_token_id=END)
    converted = CLIPModel(config).double().eval()
    converted.load_state_dict(to_transformers(state, FILE), strict=True)
    return converted


def token_ids() -> Tensor:
    """Texts of 0 to 8 words between a start and an end token, padded with 0 or with the end token."""
    ids = torch.zeros(9, 10, dtype=torch.long)
    ids[4:] = END
    for words in range(9):
        ids[words, : words + 2] = torch.tensor([END - 1, *range(3, 3 + words), END])
    return ids


def test_features_equal_those_of_the_plain_network():
    model = build()
    converted = convert(model)
    pixels = torch.randn(3, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        images = converted.get_image_features(pixel_values=pixels).pooler_output
        texts = converted.get_text_features(input_ids=token_ids()).pooler_output
        torch.testing.assert_close(images, model.encode_image(pixels), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(texts, model.encode_text(token_ids()), atol=1e-10, rtol=1e-10)
    assert images.std() > 0.1
    assert texts.std() > 0.1
    assert converted.logit_scale.item() == model.logit_scale.item()


def test_every_number_is_used_exactly_once():
    state = build().state_dict()
    numbers = iter(range(sum(tensor.numel() for tensor in state.values())))
    state = {
        name: torch.tensor([next(numbers) for _ in range(tensor.numel())]).reshape(tensor.shape)
        for name, tensor in state.items()
    }
    converted = to_transformers(state, FILE)
    everything = torch.cat([tensor.flatten() for tensor in converted.values()])
    assert everything.sort().values.equal(torch.arange(len(everything)))
    assert next(numbers, None) is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state.pop("visual.proj"), "1 missing (visual.proj) and 0 unknown"),
        (
            lambda state: state.pop("transformer.resblocks.1.attn.in_proj_bias"),
            "1 missing (transformer.resblocks.1.attn.in_proj_bias) and 0 unknown",
        ),
        (
            lambda state: state.update({"visual.head.weight": torch.ones(1)}),
            "0 missing and 1 unknown (visual.head.weight)",
        ),
        (
            lambda state: state.update({"transformer.resblocks.2.ln_1.bias": torch.ones(1)}),
            "11 missing (transformer.resblocks.2.attn.in_proj_bias",
        ),
        (lambda state: state.clear(), "14 missing (ln_final.bias, ln_final.weight"),
    ],
)
def test_missing_and_unknown_tensors_are_named(change: Callable[[dict[str, Tensor]], object], error: str):
    state = build().state_dict()
    change(state)
    with pytest.raises(InvalidArgumentError, match=re.escape(error)):
        to_transformers(state, FILE)


@pytest.mark.parametrize(
    ("heads", "name"), [((5, 4), "vision_heads"), ((3, 5), "text_heads"), ((0, 4), "vision_heads")]
)
def test_heads_must_divide_the_width(heads, name):
    with pytest.raises(InvalidArgumentError, match=rf"`{name}` must divide the width"):
        convert(build(), heads=heads)


def test_the_number_of_heads_matters():
    """Heads cannot be read off the weights, so a wrong number would go unnoticed: the default must be the right one."""
    model, pixels = build(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        wrong = convert(model, heads=(6, 4)).get_image_features(pixel_values=pixels).pooler_output
        assert not torch.allclose(wrong, model.encode_image(pixels), atol=1e-3)


def test_the_real_size_has_the_shapes_of_the_published_clip_h():
    with torch.device("meta"):
        original = OpenCLIP(
            vision=(32, 1280, 16, 5120),
            text=(24, 1024, 16, 4096),
            grid=16,
            patch=14,
            vocabulary=49408,
            length=77,
            dimension=1024,
        )
        state = original.state_dict()
        config = clip_config(state, vision_heads=16, text_heads=16, eos_token_id=49407)
        expected = CLIPModel(published_clip_h()).state_dict()
        inferred = CLIPModel(config).state_dict()
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    assert {name: tensor.shape for name, tensor in inferred.items()} == shapes
    assert {name: tensor.shape for name, tensor in to_transformers(state, FILE).items()} == shapes
    assert config.vision_config.image_size == 224
    assert config.vision_config.hidden_act == config.text_config.hidden_act == "gelu"


def published_clip_h() -> CLIPConfig:
    """Sizes of laion/CLIP-ViT-H-14-laion2B-s32B-b79K."""
    return CLIPConfig(
        vision_config={
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 224,
            "hidden_act": "gelu",
        },
        text_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "hidden_act": "gelu",
        },
        projection_dim=1024,
    )
