"""Gradients of prompt groups, known by their inner products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class GroupGradients:
    """Sums of per-sample reward gradients over each of G prompt groups, known by their inner products.

    Args:
        gram: ``[G K, G K]`` inner products of ``s[g, k]``, group by group.
        counts: ``[G, K]`` defined (sample, level) pairs behind each sum.
    """

    def __init__(self, gram: Matrix, counts: Matrix) -> None:
        self.groups, self.rewards = counts.shape
        self.counts = counts
        self.gram = gram.reshape(self.groups, self.rewards, self.groups, self.rewards)

    def between(self, a: Sequence[int], b: Sequence[int]) -> Matrix:
        """``[K, K]`` inner products of the mean gradients of group set ``a`` with those of ``b``."""
        sums = self.gram[np.ix_(a, range(self.rewards), b, range(self.rewards))].sum((0, 2))
        return sums / self._count(a)[:, None] / self._count(b)[None, :]

    def unbiased(self, a: Sequence[int]) -> Matrix:
        """Estimate of the Gramian of expected gradients from products between different groups of ``a`` only.

        Its diagonal can be negative where noise exceeds signal; it is brought back to a Gramian by dropping negative
        eigenvalues.
        """
        whole = self.gram[np.ix_(a, range(self.rewards), a, range(self.rewards))]
        own = np.einsum("gkgl->kl", whole)
        count = self._count(a)
        pairs = np.outer(count, count) - np.einsum("gk,gl->kl", self.counts[a], self.counts[a])
        estimate = (whole.sum((0, 2)) - own) / np.maximum(pairs, 1)
        values, vectors = np.linalg.eigh((estimate + estimate.T) / 2)
        repaired: Matrix = (vectors * values.clip(min=0)) @ vectors.T
        return repaired

    def _count(self, groups: Sequence[int]) -> Matrix:
        total: Matrix = self.counts[groups].sum(0).clip(min=1)
        return total
