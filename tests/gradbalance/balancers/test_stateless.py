from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.balancers import MARBLE, MGDA, Balancer, Fixed, Mean, NashMTL, StatefulBalancer
from gradbalance.errors import InvalidArgumentError, NonFiniteError
from gradbalance.solvers import min_norm

seeds = st.integers(0, 2**32 - 1)


def make_rows(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 20, generator=generator, dtype=torch.float64)
    return rows * 10 ** (4 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 2)


def test_who_remembers() -> None:
    for balancer in (Mean(), Fixed([1.0]), MGDA(), MGDA(normalize=True), NashMTL(), MARBLE(), lambda gram: gram[0]):
        assert isinstance(balancer, Balancer)
    kept = [hasattr(b, "needs_rows") for b in (Mean(), Fixed([1.0]), MGDA(), NashMTL(), MARBLE())]
    assert kept == [False, False, False, True, True]
    _: StatefulBalancer = MARBLE()


def test_representation_is_the_constructor_call() -> None:
    for balancer in (
        Mean(),
        Fixed([1.0, 0.5]),
        MGDA(normalize=True, floor=0.1),
        NashMTL(interval=3),
        MARBLE(interval=5, ema_decay=0.5, amortize="coefficients", floor=0.05, uniform_after=100),
    ):
        assert repr(eval(repr(balancer))) == repr(balancer)


def test_mean_and_fixed() -> None:
    assert Mean()(torch.eye(5)).tolist() == [0.2] * 5
    fixed = Fixed([2, 0, 1])
    assert fixed(torch.eye(3)).tolist() == [2.0, 0.0, 1.0]
    fixed(torch.eye(3)).zero_()
    assert fixed(torch.eye(3)).tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf")]])
def test_unusable_fixed_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="weights"):
        Fixed(weights)


def test_fixed_refuses_another_number_of_objectives() -> None:
    with pytest.raises(InvalidArgumentError, match="2 weights for K = 3"):
        Fixed([1.0, 1.0])(torch.eye(3))


@given(seeds, st.integers(1, 8), st.floats(0, 1))
def test_mgda_on_raw_rows_is_the_min_norm_point(seed: int, count: int, share: float) -> None:
    rows = make_rows(seed, count)
    balancer = MGDA(floor=share / count)
    weights = balancer(rows @ rows.T)
    np.testing.assert_array_equal(weights.numpy(), min_norm(rows @ rows.T, share / count).weights)
    assert torch.equal(balancer.coefficients, weights)
    assert balancer.solution.is_optimal()


@given(seeds, st.integers(1, 8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_mgda_on_unit_rows_against_forming_the_rows(seed: int, count: int, dead: list[bool]) -> None:
    rows = make_rows(seed, count)
    rows[torch.tensor(dead[:count])] = 0.0
    balancer = MGDA(normalize=True)
    direction = balancer(rows @ rows.T) @ rows
    alive = rows[rows.norm(dim=1) > 0]
    if not len(alive):
        assert torch.equal(direction, torch.zeros(20, dtype=torch.float64))
        assert balancer.solution.reason == "all rows are zero"
        return
    unit = alive / alive.norm(dim=1, keepdim=True)
    alpha = torch.from_numpy(min_norm(unit @ unit.T).weights)
    torch.testing.assert_close(direction, alive.norm(dim=1).mean() * (alpha @ unit), rtol=1e-7, atol=1e-9)
    # No objective with a gradient is opposed.
    assert (alive @ direction).min() >= 0
    assert balancer.coefficients.sum() == pytest.approx(1)


def test_mgda_refuses_bad_input() -> None:
    with pytest.raises(InvalidArgumentError, match="floor"):
        MGDA(floor=-0.1)
    with pytest.raises(InvalidArgumentError, match="floor"):
        MGDA(floor=0.5)(torch.eye(3))
    with pytest.raises(NonFiniteError):
        MGDA(normalize=True)(torch.full((2, 2), float("nan")))


def test_methods_differ() -> None:
    rows = torch.tensor([[1.0, 0.2, 0.0], [-0.5, 2.0, 0.1], [0.1, -0.3, 5.0]], dtype=torch.float64)
    gram = rows @ rows.T
    answers = [b(gram) for b in (Mean(), Fixed([1, 2, 3]), MGDA(), MGDA(normalize=True), NashMTL(), MGDA(floor=0.2))]
    for i, one in enumerate(answers):
        for other in answers[:i]:
            assert not torch.allclose(one, other, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [Mean, MGDA, lambda: MGDA(normalize=True), NashMTL, MARBLE])
def test_any_dtype_gives_float64(make: object, dtype: torch.dtype) -> None:
    gram = torch.tensor([[4.0, 1.0, 0.5], [1.0, 2.0, 0.0], [0.5, 0.0, 1.0]])
    weights = make()(gram.to(dtype))  # type: ignore[operator]
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, make()(gram.double()), rtol=1e-6, atol=0)  # type: ignore[operator]
