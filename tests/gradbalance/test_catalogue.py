"""What every balancer claims: a table, checked row by row. A new balancer adds one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest
import torch
from hypothesis import settings

import gradbalance as gb
from gradbalance.testing import (
    ClaimError,
    Invariant,
    check_balancer,
    constant,
    determinism,
    equal_gain,
    finite_output,
    keeps_protocol,
    leaves_input_alone,
    memoryless,
    min_norm_optimality,
    non_conflict,
    non_negative_weights,
    permutation_equivariance,
    plain_state,
    refuses_non_finite,
    rests_when_stationary,
    scale_equivariance,
    scale_invariance,
    simplex,
    simplex_coefficients,
    state_round_trip,
    ties_share,
    unit_min_norm_optimality,
    zero_rows_change_nothing,
    zero_rows_get_zero_weight,
)

# The solvers promise a relative duality gap of 1e-9; the direction is then right to sqrt(2e-9).
DIRECTION = 5e-5

ALL = [finite_output, determinism, leaves_input_alone, non_negative_weights]
STATELESS = [*ALL, memoryless]
STATEFUL = [*ALL, keeps_protocol, state_round_trip, plain_state]
SOLVED = [refuses_non_finite, ties_share, simplex_coefficients]
UNIT_ROWS = [*SOLVED, zero_rows_get_zero_weight, unit_min_norm_optimality, non_conflict, rests_when_stationary]
# Priorities are by place: neither permutations nor ties leave them alone.
PREFERRED = [
    refuses_non_finite,
    simplex_coefficients,
    zero_rows_get_zero_weight,
    non_conflict,
    rests_when_stationary,
]
UNIT_DIRECTIONS = [permutation_equivariance, scale_equivariance, scale_invariance, zero_rows_change_nothing]


@dataclass(frozen=True)
class Row:
    make: Callable[[], Any]
    claims: Sequence[Invariant]
    directions: Sequence[Invariant] = ()
    objectives: int | tuple[int, int] = (1, 6)


OURS = {
    "Mean()": Row(
        gb.Mean,
        [*STATELESS, constant, simplex, ties_share],
        [permutation_equivariance, scale_equivariance, zero_rows_change_nothing],
    ),
    "Fixed([1, 2, 3])": Row(lambda: gb.Fixed([1, 2, 3]), [*STATELESS, constant], [scale_equivariance], objectives=3),
    "MGDA()": Row(
        gb.MGDA,
        [*STATELESS, refuses_non_finite, ties_share, simplex, min_norm_optimality, non_conflict, rests_when_stationary],
        [permutation_equivariance, scale_equivariance],
    ),
    "MGDA(floor=0.1)": Row(
        lambda: gb.MGDA(floor=0.1),
        [*STATELESS, refuses_non_finite, ties_share, simplex],
        [permutation_equivariance, scale_equivariance],
    ),
    "MGDA(normalize=True)": Row(lambda: gb.MGDA(normalize=True), [*STATELESS, *UNIT_ROWS], UNIT_DIRECTIONS),
    "MGDA(normalize=True, floor=0.1)": Row(
        lambda: gb.MGDA(normalize=True, floor=0.1),
        [*STATELESS, *SOLVED, zero_rows_get_zero_weight],
        UNIT_DIRECTIONS,
    ),
    "MGDA(preference=[1, 2, 4])": Row(
        lambda: gb.MGDA(preference=[1, 2, 4]),
        [*STATELESS, refuses_non_finite, simplex, non_conflict, rests_when_stationary],
        [scale_equivariance],
        objectives=3,
    ),
    "MGDA(normalize=True, preference=[1, 2, 4])": Row(
        lambda: gb.MGDA(normalize=True, preference=[1, 2, 4]),
        [*STATELESS, *PREFERRED],
        [scale_equivariance, scale_invariance],
        objectives=3,
    ),
    "NashMTL()": Row(gb.NashMTL, [*STATEFUL, *SOLVED, zero_rows_get_zero_weight, equal_gain], UNIT_DIRECTIONS),
    "NashMTL(rescale)": Row(
        lambda: gb.NashMTL(rescale=True), [*STATEFUL, *SOLVED, zero_rows_get_zero_weight], UNIT_DIRECTIONS
    ),
    "NashMTL(interval=3)": Row(lambda: gb.NashMTL(interval=3), [*STATEFUL, *SOLVED, equal_gain], UNIT_DIRECTIONS),
    "MARBLE()": Row(gb.MARBLE, [*STATEFUL, *UNIT_ROWS], UNIT_DIRECTIONS),
    "MARBLE(interval=3)": Row(lambda: gb.MARBLE(interval=3), [*STATEFUL, *UNIT_ROWS], UNIT_DIRECTIONS),
    "MARBLE(amortize='coefficients')": Row(
        lambda: gb.MARBLE(interval=3, amortize="coefficients"), [*STATEFUL, *UNIT_ROWS], UNIT_DIRECTIONS
    ),
    "MARBLE(floor=0.1)": Row(
        lambda: gb.MARBLE(interval=3, floor=0.1),
        [*STATEFUL, *SOLVED, zero_rows_get_zero_weight],
        UNIT_DIRECTIONS,
    ),
    "MARBLE(shrinkage=0.3)": Row(
        lambda: gb.MARBLE(interval=3, shrinkage=0.3), [*STATEFUL, *SOLVED, zero_rows_get_zero_weight], UNIT_DIRECTIONS
    ),
    "MARBLE(preference=[1, 2, 4])": Row(
        lambda: gb.MARBLE(interval=3, preference=[1, 2, 4]),
        [*STATEFUL, *PREFERRED],
        [scale_equivariance, scale_invariance],
        objectives=3,
    ),
    "MARBLE(uniform_after=2)": Row(
        lambda: gb.MARBLE(interval=2, uniform_after=2), [*STATEFUL, *UNIT_ROWS], UNIT_DIRECTIONS
    ),
    "MARBLE(uniform_after=0)": Row(
        lambda: gb.MARBLE(interval=2, uniform_after=0),
        [*STATEFUL, *SOLVED, zero_rows_get_zero_weight],
        UNIT_DIRECTIONS,
    ),
}


@pytest.mark.parametrize("row", OURS.values(), ids=OURS)
def test_our_balancers_keep_their_claims(row: Row) -> None:
    half = settings().max_examples // 2
    check_balancer(row.make, claims=row.claims, objectives=row.objectives, max_examples=half)
    check_balancer(row.make, claims=row.directions, objectives=row.objectives, tolerance=DIRECTION, max_examples=half)


def test_every_balancer_of_ours_has_a_row() -> None:
    made = {type(row.make()) for row in OURS.values()}
    protocols = {gb.Balancer, gb.StatefulBalancer}
    public = {getattr(gb, name) for name in gb.__all__}
    balancers = {c for c in public if isinstance(c, type) and c.__module__.startswith("gradbalance.balancers")}
    assert {c for c in balancers - protocols if not getattr(c, "_is_protocol", False)} == made


class TorchJD:
    """Rows for TorchJD's weightings: claims that hold everywhere, and more on well-conditioned rows of like norms."""

    def __init__(
        self,
        name: str,
        *arguments: Any,
        claims: Sequence[Invariant],
        easy: Sequence[Invariant] = (),
        objectives: int | tuple[int, int] = (1, 5),
        tolerance: float = 1e-6,
        max_examples: int = 20,
        needs: str = "torchjd",
        **options: Any,
    ) -> None:
        self.name, self.arguments, self.options, self.needs = name, arguments, options, needs
        self.claims, self.easy, self.objectives = claims, easy, objectives
        self.tolerance, self.max_examples = tolerance, max_examples

    def __str__(self) -> str:
        return self.name

    def make(self) -> Any:
        import torchjd.aggregation

        return getattr(torchjd.aggregation, self.name)(*self.arguments, **self.options)


_EVEN = [permutation_equivariance, scale_equivariance]
_QUIET = [finite_output, leaves_input_alone]
_PURE = [*_QUIET, determinism, memoryless]
THEIRS = [
    # Frank-Wolfe stops at a step of 1e-3: near optimal, no more.
    TorchJD("MGDAWeighting", claims=[*_PURE, simplex], easy=[non_conflict, min_norm_optimality], tolerance=0.05),
    # The regularizer of 1e-4 of the trace shows in the cosines.
    TorchJD("UPGradWeighting", claims=[*_PURE, non_negative_weights], easy=[non_conflict, permutation_equivariance],
            tolerance=1e-3, needs="qpsolvers"),
    TorchJD("DualProjWeighting", claims=[*_PURE, non_negative_weights], easy=[non_conflict, permutation_equivariance],
            tolerance=1e-3, needs="qpsolvers"),
    TorchJD("CAGradWeighting", c=0.5, claims=_PURE, easy=[permutation_equivariance, zero_rows_get_zero_weight],
            tolerance=1e-3, max_examples=10, needs="cvxpy"),
    TorchJD("AlignedMTLWeighting", claims=_PURE, easy=[*_EVEN, non_conflict, zero_rows_change_nothing]),
    TorchJD("IMTLGWeighting", claims=_PURE, easy=[permutation_equivariance, non_conflict]),
    TorchJD("FairGradWeighting", alpha=1.0, claims=[leaves_input_alone, non_negative_weights],
            easy=[equal_gain], tolerance=1e-3, max_examples=10),
    TorchJD("PCGradWeighting", claims=_QUIET, easy=[non_negative_weights]),
    TorchJD("GradVacWeighting", claims=_QUIET),
    TorchJD("PCDWeighting", claims=[*_QUIET, determinism, non_negative_weights], easy=[non_conflict]),
    TorchJD("KrumWeighting", n_byzantine=1, claims=[*_PURE, simplex], easy=[scale_equivariance], objectives=(4, 6)),
    # Their projections onto the simplex round: at row norms of 1e11, MoDo's weights sum to 2.
    TorchJD("MoDoWeighting", claims=[*_QUIET, determinism], easy=[permutation_equivariance, simplex]),
    TorchJD("SDMGradWeighting", claims=[*_QUIET, determinism], easy=[permutation_equivariance, simplex]),
    TorchJD("MeanWeighting", claims=[*_PURE, simplex], easy=[*_EVEN, zero_rows_change_nothing]),
    TorchJD("SumWeighting", claims=_PURE, easy=[*_EVEN, zero_rows_change_nothing]),
    TorchJD("RandomWeighting", claims=[*_QUIET, simplex]),
    TorchJD("ConstantWeighting", torch.tensor([1.0, 2.0, 3.0]), claims=_PURE, easy=[scale_equivariance], objectives=3),
]  # fmt: skip


@pytest.mark.parametrize("row", THEIRS, ids=str)
def test_torchjd_weightings(row: TorchJD) -> None:
    pytest.importorskip("torchjd")
    pytest.importorskip(row.needs)
    # CAGrad and FairGrad take minutes, and say so by exceptions, on rows that are dependent or of unlike norms.
    heavy = row.name in ("CAGradWeighting", "FairGradWeighting")
    kinds = ["well_conditioned"] if heavy else None
    common: dict[str, Any] = {
        "objectives": row.objectives,
        "tolerance": row.tolerance,
        "max_examples": row.max_examples,
    }
    check_balancer(row.make, claims=row.claims, kinds=kinds, **common)
    for claim in row.easy:
        about = ["masked"] if claim is zero_rows_get_zero_weight else ["well_conditioned"]
        check_balancer(row.make, claims=[claim], kinds=about, **common)


# (weighting, broken claim, on rows of this kind): what a user of TorchJD 0.18 should not rely on.
GAPS = [
    ("MGDAWeighting", min_norm_optimality, "ill_scaled_stationary"),
    ("MGDAWeighting", rests_when_stationary, "ill_scaled_stationary"),
    ("MGDAWeighting", ties_share, "nearly_parallel"),
    ("MGDAWeighting", refuses_non_finite, "well_conditioned"),
    ("UPGradWeighting", non_conflict, "ill_scaled"),
    ("UPGradWeighting", scale_equivariance, "conflicting"),
    ("DualProjWeighting", non_conflict, "ill_scaled"),
    ("CAGradWeighting", scale_equivariance, "well_conditioned"),
    ("IMTLGWeighting", non_conflict, "strongly_stationary"),
    ("IMTLGWeighting", scale_equivariance, "nearly_parallel"),
    ("PCGradWeighting", determinism, "conflicting"),
    ("PCDWeighting", state_round_trip, "well_conditioned"),
    ("GradVacWeighting", state_round_trip, "well_conditioned"),
]


@pytest.mark.parametrize(("name", "claim", "kind"), GAPS, ids=lambda value: getattr(value, "name", value))
def test_the_kit_finds_the_known_gaps_of_torchjd(name: str, claim: Invariant, kind: str) -> None:
    pytest.importorskip("torchjd")
    if not version("torchjd").startswith("0.18."):
        pytest.skip("gaps of TorchJD 0.18")
    row = next(row for row in THEIRS if row.name == name)
    pytest.importorskip(row.needs)
    with pytest.raises(ClaimError, match=claim.name):
        check_balancer(row.make, claims=[claim], kinds=[kind], objectives=(1, 5), max_examples=200)


def test_torchjd_rows_are_complete() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    weightings = {name for name in aggregation.__all__ if name.endswith("Weighting")} - {"Weighting"}
    # The first wraps another weighting, the second needs the rows themselves.
    assert weightings - {row.name for row in THEIRS} == {"CRMOGMWeighting", "ExcessMTLWeighting"}
