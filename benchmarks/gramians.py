"""Rows and Gramians of three kinds, none of them Pareto-stationary, and the exact Gramian behind each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.exact import Matrix, exact_gramian

REGIMES = {
    "well-conditioned": "K x 1000 standard normal numbers: nearly orthogonal rows of nearly one length",
    "correlated, ill-scaled": "K x 1.5 K standard normal numbers, rows scaled by 10^u with u uniform in [-1, 1]",
    "singular": "K rows of dimension K/2 around a common direction, the last row a copy of the first",
}


@dataclass(frozen=True, eq=False)
class Problem:
    """One Gramian.

    Attributes:
        rows: [K, P], float64 holding float32 numbers: the same rows serve both precisions.
        gram: Their Gramian as computed in the precision under test; what the methods get.
        exact: Their Gramian in 100 decimal digits; what the answers are judged by.
    """

    rows: Tensor
    gram: Tensor
    exact: Matrix = field(repr=False)


def problems(regime: str, count: int, dtype: torch.dtype, instances: int) -> list[Problem]:
    """Draw problems with K = ``count``; the same rows for every dtype."""
    found = []
    for seed in range(instances):
        rows = torch.from_numpy(_rows(regime, count, np.random.default_rng([seed, count])).astype(np.float32))
        typed = rows.to(dtype)
        found.append(Problem(rows.double(), typed @ typed.T, exact_gramian(rows.double().numpy())))
    return found


def _rows(regime: str, count: int, random: np.random.Generator) -> np.ndarray:
    if regime == "well-conditioned":
        return random.standard_normal((count, 1000))
    if regime == "correlated, ill-scaled":
        width = math.ceil(1.5 * count)
        return random.standard_normal((count, width)) * 10 ** random.uniform(-1, 1, (count, 1))
    width = max(1, count // 2)
    rows = random.standard_normal((count, width))
    # Every row has the first coordinate positive, so no combination with weights on the simplex vanishes.
    rows[:, 0] = np.abs(rows[:, 0]) + 0.5
    rows[-1] = rows[0]
    return rows
