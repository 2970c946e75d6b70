"""Constant balancers cost one backward pass: no step collects rows for them."""

from __future__ import annotations

import pytest
import torch

import gradbalance as gb


@pytest.mark.parametrize(("balancer", "weights"), [(gb.Mean(), [0.5, 0.5]), (gb.Fixed([1.0, 3.0]), [1.0, 3.0])])
def test_no_rows_and_the_weighted_sum_of_gradients(balancer: gb.ConstantBalancer, weights: list[float]) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    info = gb.backward({"a": 3 * weight[0], "b": weight.sum()}, [weight], balancer)
    assert not info.refreshed
    assert info.gram is None
    assert info.weights.tolist() == weights
    torch.testing.assert_close(weight.grad, torch.tensor([3 * weights[0] + weights[1], weights[1]]))


def test_fixed_weights_of_another_number_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(gb.InvalidArgumentError, match="2 weights for K = 3"):
        gb.backward(list(weight.sum() * torch.arange(1.0, 4.0)), [weight], gb.Fixed([1, 1]))
    assert weight.grad is None
