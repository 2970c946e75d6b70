"""Faults of solvers and of what balancers make of them that users met; docs/decisions/faults.md has the whole list."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from every_method import METHODS, every_method, every_solver
from gradbalance import NashMTL, NonFiniteError, backward, min_norm, nash


@every_method
def test_a_row_whose_squared_norm_underflows(make: Callable[[], Any]) -> None:
    """In float32 the product of the rows is representable and the squared norm is 0: 0 / 0 in a projection."""
    weight = nn.Parameter(torch.ones(2))
    info = backward({"a": weight[0] * 1.0, "b": weight[0] * -1e-23}, [weight], make())
    assert torch.isfinite(info.weights).all()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("count", [6, 64])
@pytest.mark.parametrize("distance", [1e-4, 1e-8, 1e-12])
def test_near_duplicates_end_within_the_caps(count: int, distance: float) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = torch.ones(1, 80) + distance * torch.randn(count, 80, generator=generator, dtype=torch.float64)
    nearest, bargained = min_norm(rows @ rows.T), nash(rows @ rows.T)
    assert nearest.found
    assert nearest.iterations <= 4 * count
    assert bargained.found
    assert bargained.iterations <= 100


@pytest.mark.parametrize("interval", [1, 3])
def test_nash_over_500_steps_of_drifting_rows(interval: int) -> None:
    """Norms drift over 1e-6 ... 1e6 and cosines up to 0.9999 of either sign; some points have no solution."""
    generator = np.random.default_rng(0)
    balancer = NashMTL(interval)
    solved = 0
    for step in range(500):
        if balancer.needs_rows:
            solved += 1
            angle = 0.9999 * np.sin(step / 7)
            rows = np.vstack([[1.0, 0, 0, 0], [angle, np.sqrt(1 - angle**2), 0, 0], generator.normal(size=4)])
            rows *= 10 ** (6 * np.sin(step / np.array([[31.0], [17.0], [53.0]])))
            weights = balancer(torch.from_numpy(rows @ rows.T))
            assert balancer.solution is not None
            if balancer.solution.found:
                assert balancer.solution.gap <= 1e-10
        else:
            weights = balancer.weights
        assert (weights.dtype, weights.device.type, weights.shape) == (torch.float64, "cpu", (3,))
        assert torch.isfinite(weights).all()
        assert weights.min() > 0
        balancer.step()
    assert solved == -(-500 // interval)
    assert balancer.failures < solved


@every_solver
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_methods_treat_a_row_that_is_not_finite_alike(make: Callable[[], Any], bad: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(NonFiniteError, match=r"\['b'\]"):
        backward({"a": weight.sum(), "b": (weight * torch.tensor([1.0, bad])).nan_to_num().sum()}, [weight], make())
    assert weight.grad is None


def test_no_two_methods_do_the_same() -> None:
    """Directions over a refresh, a cached step and a refresh on other rows; each method differs from each other."""
    grams = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(3, 4, generator=generator, dtype=torch.float64) * torch.tensor([[1.0], [3.0], [0.5]])
        grams.append(rows @ rows.T)
    answers: dict[str, Tensor] = {}
    for name, make in METHODS.items():
        balancer, weights = make(3) if name == "Fixed" or "preference" in name else make(), []
        for gram in (grams[0], grams[0], grams[1], grams[1]):
            due = getattr(balancer, "needs_rows", True)
            weights.append(balancer(gram) if due else balancer.weights)
            if hasattr(balancer, "step"):
                balancer.step()
        answers[name] = torch.cat(weights)
    for one, other in combinations(answers, 2):
        assert not torch.allclose(answers[one], answers[other], rtol=1e-3), (one, other)
