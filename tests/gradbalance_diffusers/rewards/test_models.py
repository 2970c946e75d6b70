import gc
import os
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPModel, CLIPVisionModel

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.models import load_clip, load_model, load_tokenizer, resolve_device, shared


class Evil:
    """Unpickling one makes a folder, as it could do anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestSharing:
    def test_the_same_model_is_loaded_once(self, clip_path, monkeypatch):
        first = load_clip(clip_path, device="cpu")
        monkeypatch.chdir(clip_path.parent)
        again = load_clip(clip_path.name, device=torch.device("cpu"), dtype=torch.float32)
        assert again._model is first._model

    def test_a_path_in_the_home_folder(self, clip_path, monkeypatch):
        monkeypatch.setenv("HOME", str(clip_path.parent))
        assert load_clip(f"~/{clip_path.name}", device="cpu").dimension == 24

    def test_models_that_differ_are_not_shared(self, clip_path):
        first = load_model(CLIPModel, clip_path, device="cpu")
        assert load_model(CLIPModel, clip_path, device="cpu", dtype="bfloat16") is not first
        assert load_model(CLIPVisionModel, clip_path, device="cpu") is not first
        assert load_model(CLIPModel, clip_path, device="cpu", revision="v2") is not first

    def test_a_model_no_longer_used_is_freed(self):
        reference = weakref.ref(shared("layer", torch.device("cpu"), lambda: nn.Linear(2, 2)))
        gc.collect()
        assert reference() is None

    def test_models_are_frozen_and_in_evaluation_mode(self, clip_path):
        model = load_model(CLIPModel, clip_path, device="cpu")
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_a_failed_load_is_tried_again(self):
        def fail() -> nn.Module:
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            shared("failing", torch.device("cpu"), fail)
        assert isinstance(shared("failing", torch.device("cpu"), lambda: nn.Linear(1, 1)), nn.Linear)


def test_revision_and_dtype_reach_the_loader():
    class Recorder(nn.Linear):
        @classmethod
        def from_pretrained(cls, path, **options):
            calls.append((path, options))
            return cls(2, 2), {"missing_keys": []}

    calls = []
    load_model(Recorder, "some/model", revision="v2", dtype="float16", device="cpu")
    ((path, options),) = calls
    assert path == "some/model"
    assert options["revision"] == "v2"
    assert options["dtype"] == torch.float16
    assert options["weights_only"] is True


class TestErrors:
    def test_a_path_that_is_not_here(self):
        with pytest.raises(InvalidArgumentError, match=r"`path` .* a CLIPModel.*'/no/such/place'.*is no hub id"):
            load_clip("/no/such/place", device="cpu")

    def test_a_hub_id_without_network(self):
        with pytest.raises(InvalidArgumentError) as caught:
            load_clip("openai/clip-vit-large-patch14", device="cpu")
        for part in ("`path`", "HF_HUB_OFFLINE=1", "hf download openai/clip-vit-large-patch14", "path='FOLDER'"):
            assert part in str(caught.value)

    def test_a_tokenizer_that_is_not_here(self, clip_path):
        with pytest.raises(InvalidArgumentError, match=r"`tokenizer` must be .* tokenizer='FOLDER'"):
            load_clip(clip_path, tokenizer="laion/CLIP-ViT-H-14-laion2B-s32B-b79K", device="cpu")

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(InvalidArgumentError, match=re.escape(f"{str(tmp_path)!r}, which is here but cannot")):
            load_clip(tmp_path, device="cpu")

    def test_a_folder_without_a_tokenizer(self, clip_path, tmp_path):
        load_model(CLIPModel, clip_path, device="cpu").save_pretrained(tmp_path)
        with pytest.raises(InvalidArgumentError, match=r"`tokenizer` .*, which has no vocabulary\."):
            load_clip(tmp_path, device="cpu")

    def test_a_checkpoint_that_lacks_parameters(self, clip_path, tmp_path):
        load_model(CLIPModel, clip_path, device="cpu").save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["visual_projection.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InvalidArgumentError, match=r"without 1 of them, the first 'visual_projection.weight'"):
            load_clip(tmp_path, device="cpu")

    def test_a_truncated_file(self, clip_path, tmp_path):
        load_model(CLIPModel, clip_path, device="cpu").save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(InvalidArgumentError, match="cannot be loaded"):
            load_clip(tmp_path, device="cpu")

    def test_a_pickle_that_would_run_code(self, clip_path, tmp_path):
        model = load_model(CLIPModel, clip_path, device="cpu")
        model.config.save_pretrained(tmp_path)
        mark = tmp_path / "executed"
        torch.save({"logit_scale": Evil(mark)}, tmp_path / "pytorch_model.bin")
        with pytest.raises(InvalidArgumentError, match="cannot be loaded"):
            load_clip(tmp_path, device="cpu")
        assert not mark.exists()
        with (tmp_path / "plain.bin").open("wb") as file:
            pickle.dump(Evil(mark), file)
        with (tmp_path / "plain.bin").open("rb") as file:
            pickle.load(file)
        assert mark.exists()  # the file was a real danger

    @pytest.mark.parametrize("device", ["gpu", "cuda:999", "cpu:x"])
    def test_a_device_that_is_not_here(self, device, clip_path):
        with pytest.raises(InvalidArgumentError, match=rf"`device` must be .*Found '{device}'"):
            load_clip(clip_path, device=device)

    @pytest.mark.parametrize("dtype", ["fp16", "int8", torch.int64, None])
    def test_a_dtype_that_is_no_choice(self, dtype, clip_path):
        with pytest.raises(InvalidArgumentError, match=r"`dtype` must be one of \['float32', 'bfloat16', 'float16'\]"):
            load_clip(clip_path, dtype=dtype, device="cpu")


def test_default_device():
    assert resolve_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == torch.device("cpu")


def test_tokenizer_of_its_own(clip_path):
    assert len(load_tokenizer(clip_path)) == 74
