from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from gradbalance.errors import InvalidArgumentError, NonFiniteError
from gradbalance.solvers import min_norm, nash

seeds = st.integers(0, 2**32 - 1)
counts = st.integers(1, 64)


def make_rows(seed: int, count: int, columns: int, away: float) -> np.ndarray:
    """Rows around the origin (away = 0: for many rows in few columns 0 is in their hull) or away from it."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, columns))
    rows += away * rng.standard_normal(columns)
    return rows * 10.0 ** rng.uniform(-12, 12, (count, 1))


def hull_distance(rows: np.ndarray) -> float:
    """Squared distance of 0 from the hull of the unit rows."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    weights = min_norm(unit @ unit.T).weights
    return float(((weights @ unit) ** 2).sum())


def residual(gram: np.ndarray, weights: np.ndarray) -> float:
    weights = weights.astype(np.longdouble)
    return float(np.abs(weights * (gram.astype(np.longdouble) @ weights) - 1).max())


@given(seeds, counts, st.integers(1, 100), st.floats(0, 3))
def test_residual_wherever_a_solution_exists(seed: int, count: int, columns: int, away: float) -> None:
    rows = make_rows(seed, count, columns, away)
    gram = rows @ rows.T
    solution = nash(gram)
    assert np.isfinite(solution.weights).all()
    assert (solution.weights > 0).all()
    distance = hull_distance(rows)
    if distance > 1e-6 * count:
        assert solution.found
        assert residual(gram, solution.weights) <= 1e-10
        assert solution.gap == pytest.approx(residual(gram, solution.weights), abs=1e-11)
    if distance < 1e-14:
        assert not solution.found
        assert solution.stationary
        assert "Pareto-stationary" in solution.reason
    assert solution.found == (solution.reason == "")


@given(seeds, st.integers(2, 6), st.floats(0.5, 3))
def test_agrees_with_minimizing_the_convex_function(seed: int, count: int, away: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, 30)) + away
    gram = rows @ rows.T / 30
    # In log a the function is smooth without bounds.
    result = minimize(
        lambda z: 0.5 * np.exp(z) @ gram @ np.exp(z) - z.sum(),
        np.zeros(count),
        jac=lambda z: np.exp(z) * (gram @ np.exp(z)) - 1,
        method="BFGS",
        options={"gtol": 1e-9},
    )
    np.testing.assert_allclose(nash(gram).weights, np.exp(result.x), rtol=1e-5)


@given(seeds, counts, st.lists(st.floats(1e-12, 1e12), min_size=64, max_size=64))
def test_equivariant_to_row_scales_and_order(seed: int, count: int, scales: list[float]) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, count + 10)) + 0.2
    scale, order = np.array(scales[:count]), rng.permutation(count)
    scaled = (rows * scale[:, None])[order]
    np.testing.assert_allclose(
        nash(scaled @ scaled.T).weights * scale[order], nash(rows @ rows.T).weights[order], rtol=1e-7
    )


@pytest.mark.parametrize(("norms", "weights"), [((600, 700), (1.667e-3, 1.429e-3)), ((0.02, 0.0014), (50.0, 714.0))])
def test_published_magnitudes_of_orthogonal_gradients(norms: tuple[float, float], weights: tuple[float, float]) -> None:
    solution = nash(np.diag(np.square(norms)))
    np.testing.assert_allclose(solution.weights, weights, rtol=5e-4)
    np.testing.assert_allclose(solution.weights * norms, [1.0, 1.0])


def test_known_answers() -> None:
    np.testing.assert_allclose(nash([[4.0]]).weights, [0.5])
    np.testing.assert_allclose(nash(1e-8 * np.eye(2)).weights, [1e4, 1e4])
    np.testing.assert_allclose(nash(2 * np.ones((3, 3))).weights, np.full(3, 6**-0.5))
    np.testing.assert_allclose(nash([[1.0, 0.5], [0.5, 1.0]]).weights, np.full(2, 1.5**-0.5))
    assert nash([[1.0, 0.5], [0.5, 1.0]]).iterations == 0


@given(seeds, st.floats(-0.99999, 0.99999))
def test_closed_form_for_two_rows_agrees_with_newton(seed: int, cosine: float) -> None:
    rng = np.random.default_rng(seed)
    n, m = 10.0 ** rng.uniform(-5, 5, 2)
    pair = np.array([[n * n, n * m * cosine], [n * m * cosine, m * m]])
    # A third row orthogonal to both changes nothing for them, but is solved by Newton's method.
    three = np.zeros((3, 3))
    three[:2, :2], three[2, 2] = pair, 9.0
    np.testing.assert_allclose(nash(three).weights, [*nash(pair).weights, 1 / 3], rtol=1e-9)
    assert nash(three).method == "newton"


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]],
        [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]],
        [[1e9, 0.0], [-1e-9, 0.0]],
    ],
)
def test_stationary_points_give_finite_weights_and_a_reason(rows: list[list[float]]) -> None:
    solution = nash(np.array(rows) @ np.array(rows).T)
    assert not solution.found
    assert solution.stationary
    assert solution.reason.startswith("Pareto-stationary")
    assert np.isfinite(solution.weights).all()
    assert (solution.weights > 0).all()
    # What is left of the direction is small beside its parts.
    parts = solution.weights[:2, None] * np.array(rows)[:2]
    if len(rows) == 2:
        assert np.linalg.norm(parts.sum(axis=0)) <= 1e-2 * np.linalg.norm(parts)


def test_zero_rows_are_left_out_and_named() -> None:
    solution = nash(np.diag([4.0, 0.0, 0.25]))
    np.testing.assert_allclose(solution.weights, [0.5, 0.0, 2.0])
    assert not solution.found
    assert solution.reason == "zero row(s) 1: no solution exists"
    np.testing.assert_allclose(nash(np.zeros((2, 2))).weights, [0.0, 0.0])


def test_drifting_scales_for_500_steps() -> None:
    rng = np.random.default_rng(0)
    for step in range(500):
        scales = 10.0 ** (6 * np.sin(step / 50 + np.arange(4)))
        cosine = 0.9999 * np.sin(step / 30)
        rows = np.eye(4) + 0.01 * rng.standard_normal((4, 4))
        rows[1] = cosine * rows[0] + np.sqrt(1 - cosine**2) * rows[1]
        rows *= scales[:, None]
        assert nash(rows @ rows.T).found


def test_slightly_indefinite_matrix_is_repaired_and_told() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32) + np.float32(1.5)
    gram = rows @ rows.T
    assert np.linalg.eigvalsh(gram.astype(np.float64))[0] < -1e-9
    solution = nash(gram)
    assert solution.found
    assert "raised to 0" in solution.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_tensors(dtype: torch.dtype) -> None:
    gram = torch.tensor([[4.0, 1.0], [1.0, 1.0]])
    np.testing.assert_allclose(nash(gram.to(dtype)).weights, nash(gram.double()).weights, rtol=1e-6)


def test_non_finite_names_the_objectives() -> None:
    gram = np.eye(3)
    gram[0, 0] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        nash(gram)
    assert caught.value.objectives == ("0",)


@pytest.mark.parametrize(
    "gram", [np.ones((2, 3)), [[1.0, 2.0], [2.0, 1.0]], np.full((3, 3), -0.9) + 1.9 * np.eye(3)], ids=str
)
def test_what_is_no_gramian_is_refused(gram: object) -> None:
    with pytest.raises(InvalidArgumentError, match="gram"):
        nash(gram)
