"""Priorities: gains to first order go with them, at the solution and on cached steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from gradbalance.balancers import MARBLE, MGDA
from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance.solvers import min_norm, preferred_min_norm

seeds = st.integers(0, 2**32 - 1)
counts = st.integers(1, 6)
priorities = st.lists(st.floats(0.05, 20), min_size=6, max_size=6)


def make_rows(seed: int, count: int) -> torch.Tensor:
    """Few rows in many dimensions, with norms over two decades."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 20, generator=generator, dtype=torch.float64)
    return rows * 10 ** (2 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1)


def opposed_rows(seed: int, count: int) -> torch.Tensor:
    """Independent rows without a positive cosine, norms over two decades: every optimum is interior.

    Their cosines are a matrix C with non-positive entries off the diagonal and dominant diagonal, an M-matrix: its
    inverse has no negative entry, so b = C^-1 v > 0 solves the problem for whatever v > 0, that is for all norms and
    priorities.
    """
    generator = torch.Generator().manual_seed(seed)
    opposed = -torch.rand(count, count, generator=generator, dtype=torch.float64).tril(-1) * 0.9 / max(count - 1, 1)
    rows = torch.linalg.cholesky(opposed + opposed.T + torch.eye(count, dtype=torch.float64))
    return rows * 10 ** (2 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1)


def gains(rows: torch.Tensor, weights: torch.Tensor, normalize: bool) -> torch.Tensor:
    return rows @ (weights @ rows) / (rows.norm(dim=1) if normalize else 1.0)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


@given(seeds, counts, priorities, st.booleans())
def test_at_an_interior_optimum_all_gains_are_proportional(
    seed: int, count: int, given_priorities: list[float], normalize: bool
) -> None:
    rows, preference = opposed_rows(seed, count), given_priorities[:count]
    weights = MGDA(normalize, preference=preference)(rows @ rows.T)
    assert weights.min() > 0
    per_priority = gains(rows, weights, normalize) / torch.tensor(preference, dtype=torch.float64)
    close(per_priority / per_priority.mean(), torch.ones(count, dtype=torch.float64))


@given(seeds, counts, priorities, st.booleans())
def test_gains_follow_the_documented_formula(
    seed: int, count: int, given_priorities: list[float], normalize: bool
) -> None:
    rows, preference = make_rows(seed, count), torch.tensor(given_priorities[:count], dtype=torch.float64)
    balancer = MGDA(normalize, preference=preference.tolist())
    weights = balancer(rows @ rows.T)
    alpha = balancer.coefficients
    assert alpha is not None
    assert alpha.min() >= 0
    assert alpha.sum().item() == pytest.approx(1, abs=1e-12)
    mean_norm = float(rows.norm(dim=1).mean()) if normalize else 1.0
    promised = preference / (alpha @ preference) * (weights @ rows).square().sum() / mean_norm
    found = gains(rows, weights, normalize)
    assert (found >= promised * (1 - 1e-4)).all()
    close(found[alpha > 1e-6], promised[alpha > 1e-6])


@given(seeds, st.integers(1, 4), priorities, st.floats(0, 1))
def test_floor_and_preference_against_a_general_optimizer(
    seed: int, count: int, given_priorities: list[float], share: float
) -> None:
    rows, preference, floor = make_rows(seed, count).numpy(), np.array(given_priorities[:count]), share / count

    def objective(alpha: Any) -> float:
        combined = alpha @ rows
        return float(combined @ combined / (alpha @ preference) ** 2 * preference.mean() ** 2 / (rows**2).mean())

    slow = minimize(
        objective,
        np.full(count, 1 / count),
        method="SLSQP",
        bounds=[(floor, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda alpha: alpha.sum() - 1},
    )
    fast = preferred_min_norm(rows @ rows.T, preference, floor).weights
    assert fast.min() >= floor * (1 - 1e-12)
    assert fast.sum() == pytest.approx(1, abs=1e-12)
    assert objective(fast) <= objective(slow.x) * (1 + 1e-7)


@given(seeds, counts, st.floats(1e-3, 1e3), st.booleans(), st.floats(0, 0.15))
def test_equal_priorities_change_no_bit(seed: int, count: int, value: float, normalize: bool, floor: float) -> None:
    gram = (rows := make_rows(seed, count)) @ rows.T
    preferring = MGDA(normalize, floor, preference=[value] * count)
    assert torch.equal(preferring(gram), MGDA(normalize, floor)(gram))
    one, other = MARBLE(floor=floor, uniform_after=2), MARBLE(floor=floor, uniform_after=2, preference=[value] * count)
    for _ in range(3):
        assert torch.equal(one(gram), other(gram))
        assert torch.equal(one.weights, other.weights)
        one.step(), other.step()
    # The general way comes to the same.
    found = preferred_min_norm(gram, np.full(count, value), floor).weights @ rows.numpy()
    expected = min_norm(gram, floor).weights @ rows.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.linalg.norm(expected))


@given(seeds, counts, priorities, st.floats(1e-6, 1e6))
def test_only_ratios_matter(seed: int, count: int, given_priorities: list[float], factor: float) -> None:
    gram = (rows := make_rows(seed, count)) @ rows.T
    one = MARBLE(preference=given_priorities[:count])
    other = MARBLE(preference=[factor * value for value in given_priorities[:count]])
    torch.testing.assert_close(other(gram) @ rows, one(gram) @ rows, rtol=1e-4, atol=1e-6)


@given(seeds, st.integers(2, 6), priorities)
def test_cached_steps_keep_the_proportion_and_zero_rows_stay_out(
    seed: int, count: int, given_priorities: list[float]
) -> None:
    rows, preference = opposed_rows(seed, count), given_priorities[:count]
    rows[0] = 0.0
    balancer = MARBLE(interval=2, ema_decay=0.7, preference=preference)
    refreshed = balancer(rows @ rows.T)
    balancer.step()
    assert not balancer.needs_rows
    close(balancer.weights, refreshed)
    assert balancer.weights[0] == 0
    alive = rows[1:]
    per_priority = gains(alive, balancer.weights[1:], True) / torch.tensor(preference[1:], dtype=torch.float64)
    close(per_priority / per_priority.mean(), torch.ones(count - 1, dtype=torch.float64))
    # The answer is not longer than that without preference may be: the mean norm.
    assert (balancer.weights @ rows).norm() <= alive.norm(dim=1).mean() * (1 + 1e-9)


def test_the_average_holds_coefficients_of_unit_rows() -> None:
    balancer = MARBLE(interval=1, ema_decay=0.5, preference=[3, 1])
    balancer(torch.diag(torch.tensor([1.0, 4.0])))
    assert balancer.coefficients.tolist() == pytest.approx([0.75, 0.25])
    balancer.step()
    balancer(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # the second objective has no signal
    balancer.step()
    assert balancer.coefficients.tolist() == pytest.approx([0.875, 0.125])
    assert balancer.weights.tolist() == pytest.approx([0.875, 0.125 / 2])


def test_the_uniform_stage_goes_with_the_priorities() -> None:
    balancer = MARBLE(uniform_after=0, preference=[3, 2, 1])
    assert balancer(torch.diag(torch.tensor([1.0, 1.0, 0.0]))).tolist() == pytest.approx([0.6, 0.4, 0])
    assert balancer.weights.tolist() == pytest.approx([0.6, 0.4, 0])


@pytest.mark.parametrize(
    "gram",
    [
        np.zeros((3, 3)),
        np.ones((3, 3)),
        np.diag([1.0, 1.0, 0.0]),
        np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        np.array([[2.0, -1.0, -1.0], [-1.0, 2.0, -1.0], [-1.0, -1.0, 2.0]]),
        np.diag([1e-24, 1.0, 1e24]),
    ],
    ids=["all zero", "equal", "one zero", "opposite", "stationary", "ill-scaled"],
)
@pytest.mark.parametrize("floor", [0.0, 0.1, 1 / 3])
def test_degenerate_rows(gram: Any, floor: float) -> None:
    solution = preferred_min_norm(gram, np.array([1e-3, 1.0, 1e3]), floor)
    assert np.isfinite(solution.weights).all()
    assert solution.weights.min() >= floor * (1 - 1e-12)
    assert solution.weights.sum() == pytest.approx(1, abs=1e-12)
    assert solution.found


def test_of_equal_rows_the_first_in_priority_is_followed() -> None:
    assert MGDA(preference=[1, 2])(torch.ones(2, 2)).tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("make", [MGDA, MARBLE])
@pytest.mark.parametrize("preference", [[], [1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")], ["high"], 2.0])
def test_what_is_no_preference_is_refused(make: Any, preference: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="`preference` should"):
        make(preference=preference)


@pytest.mark.parametrize("make", [MGDA, MARBLE, lambda **kept: MGDA(normalize=True, **kept)])
def test_another_number_of_objectives_is_refused(make: Any) -> None:
    balancer = make(preference=[1, 2])
    with pytest.raises(InvalidArgumentError, match="2 priorities for K = 3"):
        balancer(torch.eye(3))


def test_state_of_another_number_of_objectives_is_refused() -> None:
    saved = MARBLE()
    saved(torch.eye(3))
    balancer = MARBLE(preference=[1, 2])
    with pytest.raises(StateError, match="K = 2"):
        balancer.load_state_dict(saved.state_dict())


def test_state_round_trip_and_representation() -> None:
    one, other = (MARBLE(interval=2, preference=(3, 1)) for _ in range(2))
    one(torch.tensor([[1.0, 0.5], [0.5, 2.0]]))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert torch.equal(one.weights, other.weights)
    assert "preference=[3.0, 1.0]" in repr(one)
    assert repr(eval(repr(one))) == repr(one)
    assert repr(eval(repr(MGDA(preference=[3, 1])))) == "MGDA(normalize=False, floor=0.0, preference=[3.0, 1.0])"
