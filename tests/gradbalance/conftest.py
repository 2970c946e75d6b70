"""A small model with three objectives, fresh for each test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from small_model import make_model


@pytest.fixture
def model() -> nn.Sequential:
    return make_model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 4)
