"""Very small random checkpoints of the models that rewards use, saved once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from open_clip_reference import OpenCLIP, randomize

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def make_letter_tokenizer(*, end_last: bool = True) -> CLIPTokenizer:
    """One token per letter; the end token has the highest id, as in CLIP, or else a low one."""
    letters = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    marks = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*letters, *marks] if end_last else [*marks, *letters]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def make_small_clip(tokenizer: CLIPTokenizer, **text: object) -> CLIPModel:
    """2 layers, 16x16 pictures in patches of 4, 24 features, random weights."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config=tower | ids | {"vocab_size": len(tokenizer), "projection_dim": 24} | text,
        vision_config=tower | {"image_size": 16, "patch_size": 4, "projection_dim": 24},
        projection_dim=24,
    )
    model = CLIPModel(config)
    randomize(model)
    return model.eval()


@pytest.fixture(scope="session")
def letter_tokenizer() -> Callable[..., CLIPTokenizer]:
    """The function that makes tokenizers."""
    return make_letter_tokenizer


@pytest.fixture(scope="session")
def small_clip() -> Callable[..., CLIPModel]:
    """The function that makes CLIP models."""
    return make_small_clip


@pytest.fixture(scope="session")
def clip_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random ``CLIPModel`` with its tokenizer."""
    path = tmp_path_factory.mktemp("clip")
    tokenizer = make_letter_tokenizer()
    make_small_clip(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def open_clip() -> OpenCLIP:
    """A small random CLIP in the layout of open_clip, for the tokenizer of ``clip_path``; 16 heads as ViT-H/14."""
    model = OpenCLIP(
        vision=(3, 64, 16, 40),
        text=(2, 32, 16, 48),
        grid=3,
        patch=4,
        vocabulary=len(make_letter_tokenizer()),
        length=77,
        dimension=24,
    )
    randomize(model)
    return model.eval()


@pytest.fixture(scope="session")
def hps_path(open_clip: OpenCLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the weights of ``open_clip`` saved as HPSv2.1 publishes its own."""
    path = tmp_path_factory.mktemp("hps")
    torch.save({"state_dict": open_clip.state_dict(), "epoch": 3}, path / "HPS_v2.1_compressed.pt")
    return path


@pytest.fixture(scope="session")
def head_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An aesthetic predictor on the 24 features of ``clip_path``."""
    path = tmp_path_factory.mktemp("head") / "sac+logos+ava1-l14-linearMSE.pth"
    generator = torch.Generator().manual_seed(3)
    widths = [24, 1024, 128, 64, 16, 1]
    tensors = {}
    for i, number in enumerate((0, 2, 4, 6, 7)):
        weight = torch.randn(widths[i + 1], widths[i], generator=generator) / widths[i] ** 0.5
        tensors |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": torch.randn(widths[i + 1])}
    torch.save(tensors, path)
    return path


@pytest.fixture(scope="session")
def pictures() -> torch.Tensor:
    """Five pictures of 20x28 pixels with structure on several scales."""
    generator = torch.Generator().manual_seed(5)
    coarse = torch.rand(5, 3, 5, 7, generator=generator)
    fine = torch.rand(5, 3, 20, 28, generator=generator)
    return 0.7 * torch.nn.functional.interpolate(coarse, size=(20, 28), mode="bilinear") + 0.3 * fine
