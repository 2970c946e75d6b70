"""Invariants of the weights themselves."""

from __future__ import annotations

import torch

from gradbalance.solve import coefficients_of, solve
from gradbalance.testing.case import Case, Factory
from gradbalance.testing.invariant import broken, on

# Sums of up to 64 rounded numbers.
_SUM = 1e-12


@on()
def finite_output(factory: Factory, case: Case) -> None:
    """Every Gramian with finite entries gets K finite weights, one step after the other."""
    balancer = factory()
    for rows in (*case.earlier, case.rows):
        solve(balancer, rows @ rows.T)


@on()
def non_negative_weights(factory: Factory, case: Case) -> None:
    """No weight is negative."""
    weights = solve(factory(), case.gram)
    if (weights < 0).any():
        broken(f"weights {weights.tolist()}")


@on()
def simplex(factory: Factory, case: Case) -> None:
    """The weights are non-negative and sum to 1 within the tolerance."""
    weights = solve(factory(), case.gram)
    if (weights < 0).any() or (weights.sum() - 1).abs() > max(case.tolerance, _SUM):
        broken(f"weights {weights.tolist()}, sum {weights.sum().item()!r}")


@on()
def simplex_coefficients(factory: Factory, case: Case) -> None:
    """After a call `coefficients` are non-negative, sum to 1, and are 0 for zero rows (if not all rows are zero)."""
    balancer = factory()
    solve(balancer, case.gram)
    if not case.rows.any():
        return
    found = coefficients_of(balancer)
    if found is None or found.shape != (len(case.rows),):
        broken(f"coefficients {found}, where {len(case.rows)} numbers are needed")
    total = found.sum().item()
    if (found < 0).any() or abs(total - 1) > max(case.tolerance, _SUM) or found[case.norms == 0].any():
        broken(f"coefficients {found.tolist()}, sum {total!r}")


@on("masked")
def zero_rows_get_zero_weight(factory: Factory, case: Case) -> None:
    """An objective whose row is zero (no signal) has weight 0."""
    weights = solve(factory(), case.gram)
    if weights[case.norms == 0].any():
        dead = torch.nonzero(case.norms == 0).flatten().tolist()
        broken(f"weights {weights.tolist()}, where row(s) {dead} are zero")
