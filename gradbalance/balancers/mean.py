"""The plain mean of the objectives."""

from __future__ import annotations

import torch
from torch import Tensor


class Mean:
    """Weight 1/K for every objective: the gradient of the mean of the losses.

    Example:
        >>> Mean()(torch.eye(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Return 1/K for each of the K objectives, shape [K], float64."""
        return torch.full((gram.shape[0],), 1.0 / gram.shape[0], dtype=torch.float64)

    def __repr__(self) -> str:
        return "Mean()"
