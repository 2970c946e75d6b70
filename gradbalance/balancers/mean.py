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
        return self.weights_for(gram.shape[0])

    def weights_for(self, count: int) -> Tensor:
        """Return 1/count for each of ``count`` objectives, shape [count], float64: no rows are needed."""
        return torch.full((count,), 1.0 / count, dtype=torch.float64)

    def __repr__(self) -> str:
        return "Mean()"
