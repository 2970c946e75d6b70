"""Two rows in plain numbers: the same answers, certificates and refusals as the general way through numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError, NonFiniteError
from gradbalance.solvers import min_norm, nash
from gradbalance.solvers.correlation import as_float64, correlation
from gradbalance.solvers.min_norm import _solution
from gradbalance.solvers.nash import _solve
from gradbalance.solvers.pair import pair_from, pair_of, shortest

norms = st.floats(1e-12, 1e12)
angles = st.floats(0, math.pi) | st.sampled_from([0.0, 1e-9, 1e-6, math.pi / 2, math.pi - 1e-6, math.pi])
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def gram_of(first: float, second: float, angle: float) -> np.ndarray:
    rows = np.array([[first, 0.0], [second * math.cos(angle), second * math.sin(angle)]])
    return rows @ rows.T


@given(norms, norms, angles, st.floats(0, 1), dtypes)
def test_min_norm_is_that_of_the_general_way(
    first: float, second: float, angle: float, share: float, dtype: torch.dtype
) -> None:
    gram = torch.tensor(gram_of(first, second, angle)).to(dtype)
    floor = share * 0.49
    found = min_norm(gram, floor)
    rows = correlation(gram)
    weights = np.array(shortest(pair_from(rows), floor))
    expected = _solution(rows, weights, floor, 1 - 2 * floor, 0, "closed form")
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-14, atol=0)
    assert found.gap == pytest.approx(expected.gap, rel=1e-6, abs=5e-11)  # rounding over 1e-5
    assert (found.found, found.stationary, found.reason) == (expected.found, expected.stationary, expected.reason)


@given(norms, norms, angles, dtypes)
def test_nash_is_that_of_the_general_way(first: float, second: float, angle: float, dtype: torch.dtype) -> None:
    gram = torch.tensor(gram_of(first, second, angle)).to(dtype)
    found, expected = nash(gram), _solve(*correlation(gram))
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-12, atol=0)
    assert (found.found, found.stationary, found.reason) == (expected.found, expected.stationary, expected.reason)
    assert found.gap == pytest.approx(expected.gap, rel=1e-6, abs=1e-12)


@given(norms, norms, angles)
def test_pairs_are_those_of_the_correlation(first: float, second: float, angle: float) -> None:
    gram = gram_of(first, second, angle)
    pair = pair_of(*as_float64(gram))
    if pair is None:  # beyond 1 by rounding: correlation() clips
        assert abs(gram[0, 1]) > math.sqrt(gram[0, 0]) * math.sqrt(gram[1, 1]) * (1 - 1e-15)
        return
    assert pair == pytest.approx(pair_from(correlation(gram)), rel=1e-15)


@pytest.mark.parametrize(
    "gram",
    [
        [[0.0, 0.0], [0.0, 1.0]],
        [[1e-300, 0.0], [0.0, 1.0]],
        [[1.0, 0.5 + 1e-9], [0.5, 1.0]],
        [[1.0, 1.0 + 1e-9], [1.0 + 1e-9, 1.0]],
        [[1.0, 2.0], [2.0, 1.0]],
        [[math.nan, 0.0], [0.0, 1.0]],
        [[1.0, math.nan], [math.nan, 1.0]],
        [[1.0, math.inf], [math.inf, 1.0]],
        [[math.inf, 0.0], [0.0, 1.0]],
        [[-1.0, 0.0], [0.0, 1.0]],
        [[1.0]],
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    ],
)
def test_whatever_needs_a_second_look_is_left_to_the_general_way(gram: list[list[float]]) -> None:
    assert pair_of(*as_float64(gram)) is None


@pytest.mark.parametrize("solve", [min_norm, nash])
def test_what_is_wrong_is_still_said(solve: object) -> None:
    for gram, error, message in [
        ([[math.nan, 0.0], [0.0, 1.0]], NonFiniteError, r"objective\(s\) 0 "),
        ([[1.0, math.inf], [math.inf, 1.0]], NonFiniteError, "NaN or Inf"),
        ([[1.0, 2.0], [2.0, 1.0]], InvalidArgumentError, "positive semi-definite"),
        ([[1.0, 0.5], [0.25, 1.0]], InvalidArgumentError, "symmetric"),
        ([[-1.0, 0.0], [0.0, 1.0]], InvalidArgumentError, "squared norms"),
    ]:
        with pytest.raises(error, match=message):
            solve(gram)  # type: ignore[operator]
    with pytest.raises(InvalidArgumentError, match="lower bounds leave room"):
        min_norm([[1.0, 0.0], [0.0, 1.0]], 0.6)
