"""Balancers per group when something is wrong: non-finite rows, overflows, objectives or groups without a gradient."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import gradbalance as gb
from breaking import Breaking
from grouped_model import NAMES, Net, batch, grouped, train


@pytest.mark.parametrize("warm", [0, 1, 2])
def test_a_cycle_is_skipped_for_all_groups(warm: int) -> None:
    """The bad row is one of the encoder alone; on cached cycles, of a group that keeps its weights, and of any."""
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.MARBLE(interval=3), on_nonfinite="skip")
    train(model, optimizer, range(warm))
    state = json.dumps(optimizer.state_dict()["balancer"]["state"])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    hidden = Breaking.apply(model.encoder(batch(9)).tanh())
    y = model.head(model.decoder(hidden).tanh())
    optimizer.backward({name: y[:, k].mean() for k, name in enumerate(NAMES)})
    optimizer.step()
    assert optimizer.skipped == 1
    assert optimizer.info is not None
    assert optimizer.info.skipped == NAMES
    assert not optimizer.info.weights.any()
    assert optimizer.info.groups["decoder"].skipped == NAMES
    assert json.dumps(optimizer.state_dict()["balancer"]["state"]) == state
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_bad_row_of_one_group_is_refused_before_any_balancer_is_asked() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(), gb.MARBLE())
    state = json.dumps(optimizer.state_dict()["balancer"])
    hidden = model.encoder(batch(0)).tanh()
    optimizer.backward({"a": model.decoder(hidden).mean(), "b": model.decoder(Breaking.apply(hidden)).sum()})
    with pytest.raises(gb.NonFiniteError, match=r"\['b'\]"):
        optimizer.balance()
    assert json.dumps(optimizer.state_dict()["balancer"]) == state
    assert all(p.grad is None for p in model.parameters())


def scaled_step(
    model: Net, optimizer: gb.BalancedOptimizer, scaler: torch.amp.GradScaler, seed: int, spoil: float = 1.0
) -> None:
    optimizer.zero_grad()
    losses = model.losses(batch(seed))
    losses["b"] = losses["b"] * spoil
    optimizer.backward({name: scaler.scale(loss) for name, loss in losses.items()})
    optimizer.balance()
    scaler.step(optimizer)
    scaler.update()


class Sums:
    """Keeps the sum of the rows of the first group, of every cycle that shows some."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, rows: Sequence[Tensor], names: tuple[str, ...]) -> None:
        self.found.append(rows[0].sum(0))


def test_scaler_invariance_and_overflow() -> None:
    found = []
    for scale in (1.0, 2.0**16):
        model, scaler, fed = Net(), torch.amp.GradScaler("cpu", init_scale=scale), Sums()
        optimizer = grouped(model, gb.MARBLE(interval=2), gb.MGDA(), scaler=scaler, on_rows=fed)
        for seed in range(4):
            scaled_step(model, optimizer, scaler, seed)
        state = json.dumps(optimizer.state_dict()["balancer"])
        before = [p.detach().clone() for p in model.parameters()]
        scaled_step(model, optimizer, scaler, 4, spoil=3e38)
        assert optimizer.info is not None
        assert optimizer.info.overflow
        assert optimizer.info.groups["decoder"].overflow
        assert json.dumps(optimizer.state_dict()["balancer"]) == state
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert scaler.get_scale() == scale / 2
        assert len(fed.found) == 4
        found.append([torch.cat([p.detach().flatten() for p in model.parameters()]), *fed.found])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_dead_objectives_are_told_for_each_group() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(), gb.MARBLE())
    hidden = model.encoder(batch(0)).tanh()
    deep = model.decoder(hidden).square()
    optimizer.backward({"a": deep.mean(), "b": hidden.square().mean(), "c": 0.0 * deep.sum()})
    info = optimizer.balance()
    assert info.inactive == ("c",)
    assert info.groups["encoder"].inactive == ("c",)
    assert info.groups["decoder"].inactive == ("b", "c")
    assert info.groups["decoder"].weights.count_nonzero() == 1


def test_a_group_that_no_loss_reaches_rests() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.MARBLE(interval=2))
    train(model, optimizer, range(1))
    for _ in range(2):
        optimizer.zero_grad()
        before = model.decoder.weight.detach().clone()
        hidden = model.encoder(batch(0)).tanh()
        optimizer.backward({name: hidden[:, k].square().mean() for k, name in enumerate(NAMES)})
        optimizer.step()
        assert model.decoder.weight.grad is None
        assert torch.equal(model.decoder.weight, before)
