"""State of BalancedOptimizer: saved, loaded, resumed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from gradbalance import (
    MARBLE,
    MGDA,
    BalancedOptimizer,
    InvalidArgumentError,
    Mean,
    NashMTL,
    StateError,
)
from small_model import flat, losses_of, make_model, sgd


def train(model: nn.Module, optimizer: BalancedOptimizer, steps: range) -> list[Tensor]:
    weights = []
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.backward(losses_of(model, x))
        optimizer.step()
        assert optimizer.info is not None
        weights.append(optimizer.info.weights)
    return weights


@pytest.mark.parametrize("balancer", [Mean, MGDA, lambda: NashMTL(interval=3), lambda: MARBLE(interval=4)])
@pytest.mark.parametrize("pause", [1, 4, 6])
def test_resumes_bit_for_bit(balancer: Callable[[], Any], pause: int, tmp_path: Any) -> None:
    model = make_model()
    optimizer = BalancedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), balancer())
    train(model, optimizer, range(pause))
    state = optimizer.state_dict()
    json.dumps(state["balancer"])
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "state.pt")
    expected = train(model, optimizer, range(pause, 10))

    other = make_model()
    resumed = BalancedOptimizer(torch.optim.AdamW(other.parameters(), lr=1.0), balancer())
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    found = train(other, resumed, range(pause, 10))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(flat(other), flat(model))


def without_pickle(state: dict[str, Any]) -> dict[str, Any]:
    """A state through safetensors (moments) and JSON (all else), as people keep it who trust no pickle."""
    moments = {f"{i}/{key}": value for i, own in state["state"].items() for key, value in own.items()}
    rest = json.dumps({key: value for key, value in state.items() if key != "state"})
    tensors, states = load(save(moments)), {}
    for name, value in tensors.items():
        place, key = name.split("/")
        states.setdefault(int(place), {})[key] = value
    return {**json.loads(rest), "state": states}


@pytest.mark.parametrize(
    "balancer",
    [
        Mean, MGDA, lambda: NashMTL(interval=3), lambda: MARBLE(interval=4),
        lambda: {"in": MARBLE(interval=4), "out": NashMTL(interval=3)},
    ],
    ids=["Mean", "MGDA", "NashMTL", "MARBLE", "by group"],
)  # fmt: skip
def test_resumes_bit_for_bit_without_pickle(balancer: Callable[[], Any]) -> None:
    def make() -> tuple[nn.Sequential, BalancedOptimizer]:
        model, own = make_model(), balancer()
        groups: Any = model.parameters()
        if isinstance(own, dict):
            first, *rest = model.children()
            last = [p for layer in rest for p in layer.parameters()]
            groups = [{"params": list(first.parameters()), "balanced": "in"}, {"params": last, "balanced": "out"}]
        return model, BalancedOptimizer(torch.optim.AdamW(groups, lr=1e-2), own)

    model, optimizer = make()
    train(model, optimizer, range(5))
    saved, parameters = without_pickle(optimizer.state_dict()), load(save(model.state_dict()))
    expected = train(model, optimizer, range(5, 10))
    other, resumed = make()
    other.load_state_dict(parameters)
    resumed.load_state_dict(saved)
    found = train(other, resumed, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(flat(other), flat(model))


def test_loaded_names_align_later_losses(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model)
    optimizer.backward(losses_of(model, x, "cab"))
    optimizer.step()
    other = sgd(model)
    other.load_state_dict(optimizer.state_dict())
    other.backward(losses_of(model, x, "abc"))
    assert other.balance().names == ("c", "a", "b")


def test_states_that_do_not_fit_change_nothing(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, MARBLE(interval=3))
    train(model, optimizer, range(2))
    before = json.dumps(optimizer.state_dict()["balancer"])
    with pytest.raises(StateError, match=r"optimizer\.optimizer\.load_state_dict"):
        optimizer.load_state_dict(optimizer.optimizer.state_dict())
    partial = optimizer.state_dict()
    del partial["balancer"]["skipped"]
    with pytest.raises(StateError, match="must hold class, names, skipped, state"):
        optimizer.load_state_dict(partial)
    with pytest.raises(StateError, match="balancer Mean, but the balancer is MARBLE"):
        optimizer.load_state_dict(sgd(model, Mean()).state_dict())
    small = sgd(nn.Linear(1, 1), MARBLE(interval=3))
    with pytest.raises(ValueError, match="doesn't match"):
        optimizer.load_state_dict(small.state_dict())
    assert json.dumps(optimizer.state_dict()["balancer"]) == before


def test_a_plain_callable_has_no_state(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, lambda gram: gram.diagonal().rsqrt())
    train(model, optimizer, range(2))
    other = sgd(model, lambda gram: gram.diagonal().rsqrt())
    other.load_state_dict(optimizer.state_dict())


def test_wrong_wrapped_objects(model: nn.Sequential) -> None:
    with pytest.raises(InvalidArgumentError, match=r"plain torch\.optim\.Optimizer, found list"):
        BalancedOptimizer([], Mean())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="found BalancedOptimizer"):
        BalancedOptimizer(sgd(model), Mean())
    with pytest.raises(InvalidArgumentError, match="callable"):
        sgd(model, "marble")
