"""Invariants that relate the direction to the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gradbalance.gramian import cosines
from gradbalance.solve import solve
from gradbalance.testing.case import Case, Factory, direction, shares
from gradbalance.testing.invariant import broken, on
from gradbalance.testing.kinds import NON_STATIONARY, STATIONARY

# Below this |u|^2 the Gramian itself is only known to 1e-16: see gradbalance.Solution.gap.
_SMALL = 1e-5


@on()
def non_conflict(factory: Factory, case: Case) -> None:
    """No objective gets worse to first order: the direction has no negative cosine with any row.

    A direction shorter than ``tolerance`` times the sum of the lengths that make it up counts as none, and cosines down
    to minus ``tolerance`` as zero.
    """
    weights = solve(factory(), case.gram)
    combined = direction(case.rows, weights)
    length = combined.norm()
    if length <= case.tolerance:
        return
    norms = case.norms
    cosine = (case.rows @ combined) / torch.where(norms > 0, norms, 1.0) / length
    if cosine.min() < -case.tolerance:
        worst = int(cosine.argmin())
        broken(f"weights {weights.tolist()}: cosine {cosine[worst].item():.3g} with objective {worst}")


@on()
def min_norm_optimality(factory: Factory, case: Case) -> None:
    """The weights lie on the simplex, and no other point of it gives a shorter direction.

    Checked by the relative duality gap, defined as in :class:`gradbalance.Solution`, which must be at most
    ``tolerance``.
    """
    weights = solve(factory(), case.gram)
    if (weights < 0).any() or (weights.sum() - 1).abs() > case.tolerance:
        broken(f"weights {weights.tolist()} are not on the simplex")
    gap = _gap(case.rows, weights)
    if gap > case.tolerance:
        broken(f"weights {weights.tolist()}, relative duality gap {gap:.3g}")


@on()
def unit_min_norm_optimality(factory: Factory, case: Case) -> None:
    """The direction is that of the shortest convex combination of the unit rows g_k / |g_k|, zero rows left out.

    Checked by the relative duality gap of ``share_k = c_k |g_k| / sum_j c_j |g_j|``, which must be at most
    ``tolerance``.
    """
    weights = solve(factory(), case.gram)
    alive = case.norms > 0
    if not alive.any():
        return
    share = shares(case.rows, weights)[alive]
    if (share < 0).any() or not share.any():
        broken(f"weights {weights.tolist()}: shares {share.tolist()} of the unit rows are not on the simplex")
    unit = case.rows[alive] / case.norms[alive, None]
    gap = _gap(unit, share)
    if gap > case.tolerance:
        broken(f"weights {weights.tolist()}: shares {share.tolist()}, relative duality gap {gap:.3g}")


def _gap(rows: Tensor, weights: Tensor) -> float:
    """``max_k (a' G a - (G a)_k) / (max(a' G a, 1e-5 B^2) max(1, n_k / B))`` with ``B = sum_k a_k n_k``, scale-free."""
    norms = rows.norm(dim=1)
    total = torch.dot(weights, norms)
    if total == 0:
        return 0.0
    part = shares(rows, weights)
    slopes = norms / total * (cosines(rows @ rows.T) @ part)
    squared = torch.dot(weights, slopes)
    excess = (squared - slopes) / (norms / total).clamp(min=1)
    return float(excess.max() / squared.clamp(min=_SMALL))


@on(*NON_STATIONARY)
def equal_gain(factory: Factory, case: Case) -> None:
    """Every objective gains the same: c_k (G c)_k = 1 for all k (the bargaining solution)."""
    weights = solve(factory(), case.gram)
    gains = weights * case.norms * (cosines(case.gram) @ (weights * case.norms))
    if (gains - 1).abs().max() > case.tolerance:
        broken(f"weights {weights.tolist()}: gains {gains.tolist()}")


@on(*STATIONARY)
def rests_when_stationary(factory: Factory, case: Case) -> None:
    """At a Pareto-stationary point without zero rows the direction is 0.

    Its length may be ``tolerance`` times the sum of the lengths that make it up.
    """
    weights = solve(factory(), case.gram)
    length = direction(case.rows, weights).norm().item()
    if length > case.tolerance:
        broken(f"weights {weights.tolist()}: length {length:.3g} relative to the rows that make it up")
