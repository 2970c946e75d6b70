"""What the strategies promise of their rows, checked by other means than they are made by."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import gradbalance as gb
from gradbalance.testing import KINDS, NON_STATIONARY, STATIONARY, grams, rows


def unit(matrix: torch.Tensor) -> np.ndarray:
    return (matrix / matrix.norm(dim=1, keepdim=True)).numpy()


def margin(matrix: torch.Tensor) -> float:
    """max over |d|_inf <= 1 of the least <g_k, d> over unit rows: positive iff a direction improves all objectives."""
    directions = unit(matrix)
    count, columns = directions.shape
    bounds = [(-1, 1)] * columns + [(None, 1)]
    result = linprog(
        [0] * columns + [-1], A_ub=np.hstack([-directions, np.ones((count, 1))]), b_ub=np.zeros(count), bounds=bounds
    )
    return float(result.x[-1])


def least_weight(matrix: torch.Tensor) -> float:
    """max over convex combinations equal to 0 of their least weight, for unit rows; -1 if there is no combination."""
    directions = unit(matrix)
    count, columns = directions.shape
    result = linprog(
        [0] * count + [-1],
        A_ub=np.hstack([-np.eye(count), np.ones((count, 1))]),
        b_ub=np.zeros(count),
        A_eq=np.vstack([np.hstack([directions.T, np.zeros((columns, 1))]), [1] * count + [0]]),
        b_eq=[0] * columns + [1],
        bounds=[(0, 1)] * (count + 1),
    )
    return float(result.x[-1]) if result.success else -1.0


def drawn(kind: str) -> st.SearchStrategy[torch.Tensor]:
    return rows(kinds=[kind], objectives=(3, 6))


@pytest.mark.parametrize("kind", NON_STATIONARY)
def test_non_stationary(kind: str) -> None:
    @given(drawn(kind))
    def check(matrix: torch.Tensor) -> None:
        # Nearly parallel rows point along one vector; others have a margin of at least 1 part in 9 sqrt(P) of a row.
        assert margin(matrix) > 1e-3
        assert least_weight(matrix) == -1.0

    check()


@pytest.mark.parametrize("kind", STATIONARY)
def test_stationary(kind: str) -> None:
    @given(drawn(kind))
    def check(matrix: torch.Tensor) -> None:
        assert margin(matrix) == pytest.approx(0, abs=1e-9)
        least = least_weight(matrix)
        if kind == "strictly_weakly_stationary":
            assert least == pytest.approx(0, abs=1e-9)
        else:
            assert least > 1e-4
        assert (matrix.norm(dim=1) > 0).all()

    check()


@given(drawn("well_conditioned"))
def test_well_conditioned(matrix: torch.Tensor) -> None:
    values = torch.linalg.eigvalsh(matrix @ matrix.T)
    assert values[-1] <= 10 * (1 + 1e-12) * values[0]


@given(drawn("conflicting"))
def test_conflicting(matrix: torch.Tensor) -> None:
    assert (matrix @ matrix.T).min() < 0


@given(drawn("nearly_parallel"))
def test_nearly_parallel(matrix: torch.Tensor) -> None:
    assert gb.cosines(matrix @ matrix.T).min() >= 0.998


@given(drawn("singular"))
def test_singular(matrix: torch.Tensor) -> None:
    assert torch.linalg.matrix_rank(matrix) < len(matrix)


@pytest.mark.parametrize("kind", ["ill_scaled", "ill_scaled_stationary"])
def test_ill_scaled(kind: str) -> None:
    @given(drawn(kind))
    def check(matrix: torch.Tensor) -> None:
        norms = matrix.norm(dim=1)
        assert norms.max() / norms.min() > 2.0**40 / 1000
        assert norms.max() < 2.0**40 * 1000
        assert norms.min() >= 2.0**-40

    check()


@given(drawn("masked"))
def test_masked(matrix: torch.Tensor) -> None:
    alive = matrix.norm(dim=1) > 0
    assert not alive.all()
    if alive.any():
        assert margin(matrix[alive]) > 1e-3


@given(rows(objectives=(1, 8)))
def test_gramians_are_exact(matrix: torch.Tensor) -> None:
    exact = [[Fraction(value) for value in row] for row in matrix.tolist()]
    gram = matrix @ matrix.T
    for i, one in enumerate(exact):
        for j, other in enumerate(exact):
            assert Fraction(gram[i, j].item()) == sum(a * b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_can_have_many_objectives_and_shrink_to_few(kind: str) -> None:
    @settings(max_examples=3)
    @given(rows(kinds=[kind], objectives=16))
    def check(matrix: torch.Tensor) -> None:
        assert len(matrix) == 16

    check()
    smallest = find(rows(kinds=[kind]), lambda matrix: True)
    assert len(smallest) <= 3


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(gb.InvalidArgumentError, match="kinds"):
        rows(kinds=["singular", "round"])
    with pytest.raises(gb.InvalidArgumentError, match="sequence"):
        rows(kinds="singular")
    with pytest.raises(gb.InvalidArgumentError, match="kinds"):
        grams(kinds=[])
    with pytest.raises(gb.InvalidArgumentError, match="3 objectives"):
        rows(kinds=["strictly_weakly_stationary"], objectives=2)
    for objectives in (0, (3, 2), (0, 2), 1.5, "ab", (1, 2, 3), True, (True, 2)):
        with pytest.raises(gb.InvalidArgumentError, match="objectives"):
            rows(objectives=objectives)  # type: ignore[arg-type]


@given(grams(kinds=["masked"], objectives=(2, 5)))
def test_grams_are_those_of_rows(gram: torch.Tensor) -> None:
    assert 2 <= len(gram) <= 5
    assert gram.dtype == torch.float64
    assert torch.equal(gram, gram.T)
    dead = gram.diagonal() == 0
    assert dead.any()
    assert not gram[dead].any()
