"""One input on which claims are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradbalance.solve import BalancerLike, cached_weights, count_step, needs_rows, solve

Factory: TypeAlias = Callable[[], BalancerLike]


@dataclass(frozen=True, eq=False)
class Case:
    """Rows of K objectives, and what the invariants need around them.

    Attributes:
        rows: [K, P] float64.
        kind: Which of the proved kinds the rows are of; see :data:`~gradbalance.testing.KINDS`.
        earlier: Rows [K, P_i] of one or two steps before, of no particular kind, for balancers that remember.
        scales: [K] powers of two between 2^-10 and 2^10, one per objective.
        factor: One power of two between 2^-40 and 2^40, common to all.
        order: A permutation of the objectives.
        tolerance: Relative error allowed to the balancer.
    """

    rows: Tensor
    kind: str
    earlier: tuple[Tensor, ...]
    scales: Tensor
    factor: float
    order: tuple[int, ...]
    tolerance: float

    @property
    def gram(self) -> Tensor:
        """Gramian of the rows, float64 [K, K]."""
        return product(self.rows)

    @property
    def norms(self) -> Tensor:
        """Row norms, float64 [K]."""
        return lengths(self.rows)


def product(rows: Tensor) -> Tensor:
    """``rows @ rows.T``."""
    return rows @ rows.T


def lengths(rows: Tensor) -> Tensor:
    """Row norms."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def shares(rows: Tensor, weights: Tensor) -> Tensor:
    """Each row's part in the direction: ``w_k |g_k| / sum_j |w_j| |g_j|``, shape [K]; zeros where the sum is 0."""
    parts = weights * lengths(rows)
    total = parts.abs().sum()
    return parts / total if total > 0 else torch.zeros_like(parts)


def direction(rows: Tensor, weights: Tensor) -> Tensor:
    """The direction without units, ``u = sum_k share_k g_k / |g_k|``, shape [P]: 1 in length if all rows agree."""
    norms = lengths(rows)[:, None]
    return shares(rows, weights) @ torch.where(norms > 0, rows / norms, 0.0)


def drive(balancer: BalancerLike, steps: tuple[Tensor, ...]) -> list[Tensor]:
    """Run a balancer through optimizer steps whose rows are ``steps``, as the optimizer does; weights of each step."""
    answers = []
    for rows in steps:
        if needs_rows(balancer):
            answers.append(solve(balancer, product(rows)))
        else:
            answers.append(cached_weights(balancer, len(rows)).clone())
        count_step(balancer)
    return answers
