"""Very small random checkpoints of the models that rewards use, saved once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CLIPModel, CLIPTokenizer

from open_clip_reference import OpenCLIP
from small_clip import make_letter_tokenizer, make_open_clip, make_small_clip


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
    return make_open_clip()


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
