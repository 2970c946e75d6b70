"""What PickScore, HPSv2.1, CLIPScore and the aesthetic predictor have in common, and their formulas by hand."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cosine_similarity
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from gradbalance.errors import InvalidArgumentError, MissingDependencyError
from gradbalance_diffusers.rewards import RewardSet, make_reward
from gradbalance_diffusers.rewards.images import cropped, padded, to_uint8
from open_clip_reference import OpenCLIP

PROMPTS = ["a red cat", "two dogs", "a red cat", "", "x y"]
NAMES = ["pickscore", "hpsv2", "clipscore", "aesthetic"]


@pytest.fixture(scope="module")
def build(clip_path, hps_path, head_path) -> Callable:
    """Makes a reward by its name from the small checkpoints, on the CPU."""
    paths: dict[str, dict] = {
        "pickscore": {"path": clip_path},
        "hpsv2": {"path": hps_path, "tokenizer": clip_path},
        "clipscore": {"path": clip_path},
        "aesthetic": {"path": clip_path, "head": head_path},
    }
    return lambda name, **options: make_reward(name, **(paths[name] | {"device": "cpu"} | options))


def tokens(clip_path: Path, prompts: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = CLIPTokenizer.from_pretrained(clip_path)
    return tokenizer(prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")


def processed(pictures: torch.Tensor) -> torch.Tensor:
    processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return processor(images=[Image.fromarray(array) for array in to_uint8(pictures)], return_tensors="pt").pixel_values


class TestFormulas:
    def test_pickscore(self, build, clip_path, pictures):
        with torch.no_grad():
            output = CLIPModel.from_pretrained(clip_path)(
                pixel_values=processed(pictures), **tokens(clip_path, PROMPTS)
            )
        expected = output.logits_per_text.diagonal() / 26
        assert build("pickscore")(pictures, PROMPTS) == pytest.approx(expected.tolist(), abs=1e-6)

    def test_clipscore(self, build, clip_path, pictures):
        with torch.no_grad():
            output = CLIPModel.from_pretrained(clip_path)(
                pixel_values=cropped(pictures, 16), **tokens(clip_path, PROMPTS)
            )
        expected = output.logits_per_image.diagonal() / 100
        assert build("clipscore")(pictures, PROMPTS) == pytest.approx(expected.tolist(), abs=1e-7)

    def test_clipscore_is_the_cosine_for_a_logit_scale_of_100(self, build, clip_path, pictures, tmp_path):
        model = CLIPModel.from_pretrained(clip_path)
        model.logit_scale.data.fill_(100).log_()
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            images = model.get_image_features(pixel_values=cropped(pictures, 16)).pooler_output
            texts = model.get_text_features(**tokens(clip_path, PROMPTS)).pooler_output
        scores = build("clipscore", path=tmp_path, tokenizer=clip_path)(pictures, PROMPTS)
        assert scores == pytest.approx(cosine_similarity(images, texts).tolist(), abs=1e-6)

    def test_hpsv2(self, build, open_clip: OpenCLIP, clip_path, pictures):
        with torch.no_grad():
            images = open_clip.encode_image(padded(pictures, 12))
            texts = open_clip.encode_text(tokens(clip_path, PROMPTS)["input_ids"])
        expected = cosine_similarity(images, texts).tolist()
        assert build("hpsv2")(pictures, PROMPTS) == pytest.approx(expected, abs=1e-6)

    def test_aesthetic(self, build, clip_path, head_path, pictures):
        with torch.no_grad():
            features = CLIPModel.from_pretrained(clip_path).get_image_features(pixel_values=processed(pictures))
        vectors = features.pooler_output.double().numpy()
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        head = {name: tensor.double().numpy() for name, tensor in torch.load(head_path, weights_only=True).items()}
        for number in (0, 2, 4, 6, 7):
            vectors = vectors @ head[f"layers.{number}.weight"].T + head[f"layers.{number}.bias"]
        assert build("aesthetic")(pictures, PROMPTS) == pytest.approx(vectors[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
class TestEveryReward:
    def test_columns_of_a_reward_set(self, build, pictures, name):
        reward = build(name)
        table = RewardSet([reward], workers=1)(pictures, PROMPTS, [{"source": "ocr"}] * 5)
        assert table.names == (name,)
        assert table.values[:, 0].tolist() == reward(pictures, PROMPTS)
        assert table.values.unique().numel() == 5

    @pytest.mark.parametrize("batch_size", [1, 2, 5, 7])
    def test_scores_do_not_depend_on_the_batch_size(self, build, pictures, name, batch_size):
        expected = build(name)(pictures, PROMPTS)
        assert build(name, batch_size=batch_size)(pictures, PROMPTS) == pytest.approx(expected, rel=1e-5)

    def test_no_pictures(self, build, pictures, name):
        assert build(name)(pictures[:0], []) == []

    def test_a_prompt_of_300_words_is_cut(self, build, pictures, name):
        words = ["a", "b", "c"] * 100
        long, short = " ".join(words), " ".join(words[:75])
        reward = build(name)
        assert reward(pictures[:2], [long, long]) == pytest.approx(reward(pictures[:2], [short, short]), abs=1e-6)

    def test_bfloat16_is_close(self, build, pictures, name):
        exact, low = build(name)(pictures, PROMPTS), build(name, dtype="bfloat16")(pictures, PROMPTS)
        assert low == pytest.approx(exact, abs=0.05 if name == "aesthetic" else 0.03)
        assert low != exact

    def test_pictures_in_half_precision_on_their_way_from_the_decoder(self, build, pictures, name):
        exact = build(name)(pictures, PROMPTS)
        assert build(name)(pictures.half(), PROMPTS) == pytest.approx(exact, abs=0.02)

    def test_pictures_are_left_as_they_were(self, build, pictures, name):
        before = pictures.clone()
        build(name)(pictures, PROMPTS)
        assert pictures.equal(before)

    def test_one_model_for_training_and_evaluation(self, build, name):
        assert build(name)._clip._model is build(name, batch_size=3)._clip._model

    def test_wrong_path(self, build, name):
        with pytest.raises(InvalidArgumentError, match=r"`path` .*'/no/such/model'.*is no hub id"):
            build(name, path="/no/such/model")

    def test_hub_id_without_network(self, build, name):
        with pytest.raises(InvalidArgumentError, match=r"'some/model'.*HF_HUB_OFFLINE=1.*path='FOLDER'"):
            build(name, path="some/model")

    def test_defaults_are_hub_ids(self, name):
        ids = {
            "pickscore": "yuvalkirstain/PickScore_v1",
            "hpsv2": "xswu/HPSv2",
            "clipscore": "openai/clip-vit-large-patch14",
            "aesthetic": "trl-lib/ddpo-aesthetic-predictor",
        }
        with pytest.raises(InvalidArgumentError, match=f"hf download {ids[name]} "):
            make_reward(name)

    def test_one_prompt_for_several_pictures(self, build, pictures, name):
        with pytest.raises(InvalidArgumentError, match=r"one entry per picture. Found 5 pictures and 1 prompts"):
            build(name)(pictures, ["a red cat"])

    @pytest.mark.parametrize("batch_size", [0, -1, 2.0, "8"])
    def test_wrong_batch_size(self, build, name, batch_size):
        with pytest.raises(
            InvalidArgumentError, match=rf"`batch_size` must be a positive integer. Found {batch_size!r}"
        ):
            build(name, batch_size=batch_size)

    def test_missing_package(self, build, name, monkeypatch):
        for module in [module for module in sys.modules if module.startswith("gradbalance_diffusers.rewards.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingDependencyError, match=r"'transformers': pip install \"gradbalance\[diffusers\]\""):
            build(name)


def test_rewards_on_the_same_clip_share_it(build):
    rewards = [build(name) for name in ("clipscore", "aesthetic", "pickscore")]
    assert len({id(reward._clip._model) for reward in rewards}) == 1


class TestHPSv2:
    def test_the_file_itself(self, build, hps_path, pictures):
        expected = build("hpsv2")(pictures, PROMPTS)
        assert build("hpsv2", path=hps_path / "HPS_v2.1_compressed.pt")(pictures, PROMPTS) == expected

    def test_another_number_of_heads_is_another_model(self, build, pictures):
        assert build("hpsv2", vision_heads=8)(pictures, PROMPTS) != build("hpsv2")(pictures, PROMPTS)

    def test_end_token_must_have_the_highest_id(self, build, letter_tokenizer, tmp_path):
        letter_tokenizer(end_last=False).save_pretrained(tmp_path)
        with pytest.raises(InvalidArgumentError, match=r"the highest id.* with the id 1 of 74"):
            build("hpsv2", tokenizer=tmp_path)

    def test_a_checkpoint_of_something_else(self, build, head_path):
        with pytest.raises(
            InvalidArgumentError, match=r"a CLIP in the layout of open_clip.* 10 unknown \(layers.0.bias"
        ):
            build("hpsv2", path=head_path)


class TestAesthetic:
    def test_features_that_do_not_fit(self, build, tmp_path, head_path):
        tensors = torch.load(head_path, weights_only=True)
        tensors["layers.0.weight"] = torch.ones(1024, 768)
        torch.save(tensors, tmp_path / "head.pth")
        with pytest.raises(InvalidArgumentError, match=r"`head` must take the 24 features .* takes 768"):
            build("aesthetic", head=tmp_path / "head.pth")

    def test_layers_that_do_not_fit(self, build, tmp_path, head_path):
        tensors = torch.load(head_path, weights_only=True)
        tensors["layers.4.weight"] = torch.ones(64, 127)
        torch.save(tensors, tmp_path / "aesthetic-model.pth")
        with pytest.raises(InvalidArgumentError, match=r"`head` must hold linear layers that fit.*\(64, 127\)"):
            build("aesthetic", head=tmp_path)

    def test_keys_of_something_else(self, build, hps_path):
        with pytest.raises(InvalidArgumentError, match=r"`head` must hold the tensors of the aesthetic predictor"):
            build("aesthetic", head=hps_path / "HPS_v2.1_compressed.pt")

    def test_predictor_without_network(self, build):
        with pytest.raises(InvalidArgumentError, match=r"`head` .* head='FOLDER'"):
            build("aesthetic", head="trl-lib/ddpo-aesthetic-predictor")
