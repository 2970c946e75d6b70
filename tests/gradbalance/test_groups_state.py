"""States of several balancers: loaded all or none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbalance as gb
from grouped_model import Net, grouped, train


@pytest.mark.parametrize("pause", [1, 2, 5])
def test_resumes_bit_for_bit(pause: int) -> None:
    def make() -> tuple[Net, gb.BalancedOptimizer]:
        model = Net()
        return model, grouped(model, gb.MARBLE(interval=2), gb.NashMTL(interval=3))

    model, optimizer = make()
    train(model, optimizer, range(pause))
    saved = optimizer.state_dict()
    saved["balancer"] = json.loads(json.dumps(saved["balancer"]))
    assert saved["balancer"]["class"] == {"encoder": "MARBLE", "decoder": "NashMTL"}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {k: {n: v.clone() for n, v in s.items()} for k, s in saved["state"].items()}
    expected = train(model, optimizer, range(pause, 8))
    other, resumed = make()
    other.load_state_dict(weights)
    resumed.load_state_dict({**saved, "state": buffers})
    found = train(other, resumed, range(pause, 8))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_states_that_do_not_fit_change_nothing() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.NashMTL())
    train(model, optimizer, range(3))
    before = json.dumps(optimizer.state_dict()["balancer"])
    swapped = grouped(Net(), gb.NashMTL(), gb.MARBLE(interval=2))
    single = gb.BalancedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), gb.MARBLE())
    for other in (swapped, single):
        with pytest.raises(gb.StateError, match="but the balancers are"):
            optimizer.load_state_dict(other.state_dict())
    with pytest.raises(gb.StateError, match="but the balancers are MARBLE"):
        single.load_state_dict(optimizer.state_dict())
    # The second state is refused after the first was loaded.
    broken = optimizer.state_dict()
    train(model, optimizer, range(3, 4))
    before = json.dumps(optimizer.state_dict()["balancer"])
    broken["balancer"]["state"]["decoder"]["balancer"] = "other"
    with pytest.raises(gb.StateError):
        optimizer.load_state_dict(broken)
    assert json.dumps(optimizer.state_dict()["balancer"]) == before
    broken["balancer"]["state"] = {"encoder": None}
    with pytest.raises(gb.StateError, match="a state for each of the balancers"):
        optimizer.load_state_dict(broken)
    assert json.dumps(optimizer.state_dict()["balancer"]) == before


class Averaging(nn.Module):
    """A weighting as another library would write it: its state is a live tensor, loaded in place."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
        self.refuses = refuses

    def forward(self, gram: Tensor) -> Tensor:
        self.average += gram.diagonal()
        return 1 / self.average

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        if self.refuses:
            raise KeyError("average")
        return super().load_state_dict(*arguments, **options)


def test_live_tensors_are_taken_back_too() -> None:
    model = Net()
    optimizer = grouped(model, Averaging(), Averaging(refuses=True))
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()["balancer"]["state"]["encoder"]["average"].clone()
    other = Net()
    fresh = grouped(other, Averaging(), Averaging(refuses=True))
    train(other, fresh, range(1))
    before = fresh.balancer["encoder"].average.clone()  # type: ignore[index]
    assert not torch.equal(before, saved)
    with pytest.raises(gb.StateError, match="balancer Averaging does not take the state"):
        fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.balancer["encoder"].average, before)  # type: ignore[index]
    fresh.balancer["decoder"].refuses = False  # type: ignore[index]
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.balancer["encoder"].average, saved)  # type: ignore[index]
