"""Fixed weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


class Fixed:
    """The given weights on every step, used as they are: they are not made to sum to 1.

    Args:
        weights: One finite number >= 0 per objective, in the order of the losses, not all zero.

    Raises:
        InvalidArgumentError: No weights, one is negative or not finite, or all are zero; when called, K differs.

    Example:
        >>> Fixed([1, 1, 2])(torch.eye(3))
        tensor([1., 1., 2.], dtype=torch.float64)
    """

    def __init__(self, weights: Iterable[float]) -> None:
        values = [float(weight) for weight in weights]
        if not all(math.isfinite(value) and value >= 0 for value in values) or not sum(values) > 0:
            raise InvalidArgumentError(
                f"`weights` should be finite numbers >= 0, at least one of them > 0. Found {values}. Give one per "
                "objective."
            )
        self._weights = values

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Return the weights, shape [K], float64; only the shape of ``gram`` is looked at."""
        return self.weights_for(gram.shape[0])

    def weights_for(self, count: int) -> Tensor:
        """Return the weights, shape [count], float64: no rows are needed."""
        if count != len(self._weights):
            raise InvalidArgumentError(
                f"`weights` should hold one number per objective. Found {len(self._weights)} weights for K = {count}."
            )
        return torch.tensor(self._weights, dtype=torch.float64)

    def __repr__(self) -> str:
        return f"Fixed({self._weights})"
