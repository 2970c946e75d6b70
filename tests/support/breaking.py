"""A finite loss whose gradient is not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Breaking(torch.autograd.Function):
    """The identity with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan
