"""A balancer with a memory: weights in use, late refreshes, states."""

from __future__ import annotations

import json

import pytest
import torch

import gradbalance as gb
from gradbalance_trl.balance import Balance, metrics

GRAM = torch.tensor([[1.0, -0.5], [-0.5, 9.0]], dtype=torch.float64)


def info_of(gram: torch.Tensor) -> gb.BalanceInfo:
    norms = gram.diagonal().sqrt()
    return gb.BalanceInfo(("a", "b"), torch.ones(2), torch.zeros(2), norms > 0, True, gram=gram, norms=norms)


def test_write_gives_the_balancers_weights() -> None:
    balance, alone = Balance(["a", "b"], gb.MARBLE(interval=2), "write"), gb.MARBLE(interval=2)
    assert balance.needs_rows
    assert balance.weights.tolist() == [0.5, 0.5]
    assert torch.equal(balance(GRAM), alone(GRAM))
    balance.step(), alone.step()
    assert not balance.needs_rows
    assert torch.equal(balance.weights, alone.weights)
    assert torch.equal(balance.coefficients, alone.coefficients)


@pytest.mark.parametrize("make", [gb.MARBLE, gb.NashMTL, gb.MGDA, lambda: lambda gram: gram.diagonal().rsqrt()])
def test_lagged_writes_nothing_and_uses_the_weights_later(make) -> None:
    balance, alone = Balance(["a", "b"], make(), "lagged"), make()
    solved = alone(GRAM)
    assert balance(GRAM).tolist() == [0.0, 0.0]
    balance.step()
    if hasattr(alone, "step"):
        alone.step()
    assert torch.equal(balance.weights, getattr(alone, "weights", solved))


def test_constant_weights_never_need_rows() -> None:
    balance = Balance(["a", "b"], gb.Fixed([1, 3]), "write")
    assert not balance.needs_rows
    assert not balance.ever_needs_rows
    assert balance.weights.tolist() == [1.0, 3.0]
    assert balance.coefficients.tolist() == [1.0, 3.0]


def test_rows_of_zeros_teach_nothing() -> None:
    balance = Balance(["a", "b"], gb.MARBLE(), "lagged")
    balance(torch.zeros(2, 2))
    assert balance.weights.tolist() == [0.5, 0.5]
    assert balance.needs_rows


@pytest.mark.parametrize("make", [gb.MARBLE, gb.NashMTL, gb.MGDA])
@pytest.mark.parametrize("refresh", ["write", "lagged"])
def test_state_survives_json_bit_for_bit(make, refresh: str) -> None:
    first, second = (Balance(["a", "b"], make(), refresh) for _ in range(2))
    first(GRAM / 3)
    first.step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(first.weights, second.weights)
    assert first.needs_rows == second.needs_rows
    assert second.state_dict() == first.state_dict()


def test_states_that_do_not_fit() -> None:
    state = Balance(["a", "b"], gb.MARBLE(), "write").state_dict()
    with pytest.raises(gb.StateError, match=r"names \['a', 'b'\], found \['a', 'c'\]"):
        Balance(["a", "c"], gb.MARBLE(), "write").load_state_dict(state)
    with pytest.raises(gb.StateError, match="balancer MARBLE, found MGDA"):
        Balance(["a", "b"], gb.MGDA(), "write").load_state_dict(state)
    with pytest.raises(gb.InvalidArgumentError, match="callable"):
        Balance(["a"], "marble", "write")


def test_metrics_name_the_reward_that_a_step_opposes() -> None:
    balance = Balance(["a", "b"], gb.Fixed([1, 1]), "write")
    assert metrics(balance, None, balance.weights) == {"balance/a/coef": 1.0, "balance/b/coef": 1.0}
    gram = torch.tensor([[1.0, -2.0], [-2.0, 16.0]], dtype=torch.float64)
    logged = metrics(balance, info_of(gram), torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert logged["balance/b/grad_norm"] == 4.0
    # d = g_a + g_b, <d, g_a> = 1 - 2, |d|^2 = 1 - 4 + 16.
    assert logged["balance/worst_cosine"] == pytest.approx(-1 / 13**0.5)


def test_metrics_leave_out_rewards_without_gradient_and_directions_of_noise() -> None:
    balance = Balance(["a", "b"], gb.Fixed([1, 1]), "write")
    gram = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert metrics(balance, info_of(gram), balance.weights)["balance/worst_cosine"] == pytest.approx(1.0)
    opposite = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert metrics(balance, info_of(opposite), balance.weights)["balance/worst_cosine"] == 0.0
    nothing = metrics(balance, info_of(torch.zeros(2, 2, dtype=torch.float64)), balance.weights)
    assert "balance/worst_cosine" not in nothing
