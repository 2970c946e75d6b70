"""Invariants under changes that should not matter: of units, of order, and by rows that add nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from gradbalance.solve import solve
from gradbalance.testing.case import Case, Factory, direction, product, shares
from gradbalance.testing.invariant import broken, on
from gradbalance.testing.kinds import KINDS

_WITHOUT_ZERO_ROWS = tuple(kind for kind in KINDS if kind != "masked")


@on()
def scale_equivariance(factory: Factory, case: Case) -> None:
    """One factor common to all rows (a loss scale, a change of learning rate) does not turn the direction."""
    _same_direction(factory, case, case.rows * case.factor, f"all rows times {case.factor:g}")


@on()
def scale_invariance(factory: Factory, case: Case) -> None:
    """A factor of its own for each row (a change of unit of one loss) does not turn the direction."""
    _same_direction(factory, case, case.rows * case.scales[:, None], f"rows times {case.scales.tolist()}")


def _same_direction(factory: Factory, case: Case, changed: Tensor, what: str) -> None:
    """Compare directions without units; near 0, where a direction is noise, by length."""
    before = solve(factory(), case.gram)
    after = solve(factory(), product(changed))
    one, other = direction(case.rows, before), direction(changed, after)
    short, long = sorted((one.norm().item(), other.norm().item()))
    if short <= case.tolerance**2:
        if long > case.tolerance:
            broken(f"weights {before.tolist()}; {what}, {after.tolist()}: the direction is 0 in one case only")
        return
    turn = (one / one.norm() - other / other.norm()).norm().item()
    if turn * min(short, 1.0) > case.tolerance:
        broken(f"weights {before.tolist()}; {what}, {after.tolist()}: the direction turns by {turn:.3g} rad")


@on()
def permutation_equivariance(factory: Factory, case: Case) -> None:
    """The order of the objectives does not matter: reordered, they give the same direction.

    Their weights may differ where several give it. As for the other symmetries: a solver that stops at a relative gap e
    finds the direction to sqrt(2 e).
    """
    order = list(case.order)
    _same_direction(factory, case, case.rows[order], f"in the order {order}")


@on()
def ties_share(factory: Factory, case: Case) -> None:
    """Equal rows get equal weights."""
    twice = torch.cat([case.rows, case.rows[:1]])
    weights = solve(factory(), product(twice))
    part = shares(twice, weights)
    if (part[0] - part[-1]).abs() > case.tolerance:
        broken(f"weights {weights.tolist()}, where the first row was given again as the last")


@on(*_WITHOUT_ZERO_ROWS)
def zero_rows_change_nothing(factory: Factory, case: Case) -> None:
    """One more objective, whose row is zero (no signal), leaves the direction as it was."""
    before = solve(factory(), case.gram)
    padded = torch.cat([case.rows, torch.zeros_like(case.rows[:1])])
    after = solve(factory(), product(padded))
    if (shares(case.rows, before) - shares(padded, after)[:-1]).abs().max() > case.tolerance:
        broken(f"weights {before.tolist()}; with a zero row at the end, {after.tolist()}")
