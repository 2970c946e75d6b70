"""A small model with three objectives, and a compiler that remembers no other test, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Models compiled before, for other shapes, have the next one compiled for any shape, to another graph."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
