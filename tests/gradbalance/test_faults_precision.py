"""Faults of number formats that users met; docs/decisions/faults.md has the whole list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from every_method import every_solver, flat
from gradbalance import MARBLE, MGDA, BalancedOptimizer, NashMTL, backward


@every_solver
def test_weights_for_a_mix_of_half_and_full_precision(make: Callable[[], Any]) -> None:
    """200,000 small entries: sums in half precision would stop growing at a few hundred, or overflow."""
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.zeros(200_000, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(200_000, dtype=torch.float16)),
        nn.Parameter(torch.zeros(50, dtype=torch.float32)),
    ]
    slopes = [
        [(torch.randn(p.shape, generator=generator) + mean).to(p.dtype) for p in parameters] for mean in (0.5, -0.3)
    ]
    losses = {
        name: factor * torch.stack([(p.float() * s.float()).sum() for p, s in zip(parameters, row, strict=True)]).sum()
        for name, factor, row in zip("ab", (1.0, 4.0), slopes, strict=True)
    }
    info = backward(losses, parameters, make())
    rows = torch.stack([flat(slopes[0]), 4 * flat(slopes[1])])
    torch.testing.assert_close(info.weights, make()(rows @ rows.T), rtol=1e-3, atol=0)
    assert [p.grad.dtype for p in parameters if p.grad is not None] == [p.dtype for p in parameters]


def test_float16_parameters_under_a_scaler_are_not_scaled_in_silence() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.1), MGDA(), scaler=scaler)
    optimizer.backward({"a": scaler.scale(weight.float().sum()), "b": scaler.scale(weight.float().prod())})
    optimizer.balance()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("make", [lambda: MARBLE(interval=2), NashMTL, lambda: MGDA(normalize=True)])
@pytest.mark.parametrize("call", ["optimizer", "function"])
def test_an_objective_that_all_but_vanishes_makes_no_infinite_gradient(make: Any, call: str) -> None:
    """Its weight, near 1 / |g|, is beyond float32: it counts as an objective without signal, and comes back."""
    weight = nn.Parameter(torch.ones(2))
    for slope in (1e-40, 1e-3):
        balancer = make()
        optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.0), balancer)
        losses = {"faint": slope * weight[0], "loud": 2 * weight[1]}
        weight.grad = None
        if call == "optimizer":
            optimizer.backward(losses)
            info = optimizer.balance()
        else:
            info = backward(losses, [weight], balancer)
        assert weight.grad is not None
        assert torch.isfinite(weight.grad).all()
        assert weight.grad[1] > 0
        assert (weight.grad[0] > 0) == (slope == 1e-3)
        assert info.inactive == (("faint",) if slope == 1e-40 else ())
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    info = backward({"faint": 1e-40 * wide[0], "loud": 2 * wide[1]}, [wide], make())
    assert info.inactive == ()
