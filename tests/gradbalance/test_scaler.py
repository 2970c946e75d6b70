"""Loss scaling: the answer does not depend on the scale, and an overflow skips the step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbalance import MARBLE, MGDA, AffineLoss, BalancedOptimizer, NashMTL, NonFiniteError, StateError, summary


def make(balancer: Any, scale: float, **options: Any) -> tuple[nn.Module, BalancedOptimizer, torch.amp.GradScaler]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, BalancedOptimizer(inner, balancer, scaler=scaler, **options), scaler


def step(
    model: nn.Module, optimizer: BalancedOptimizer, scaler: torch.amp.GradScaler, x: Tensor, spoil: str = ""
) -> None:
    optimizer.zero_grad()
    y = model(x)
    losses = {name: y[:, k].square().mean() * (k + 1) for k, name in enumerate("abc")}
    if spoil:
        losses[spoil] = losses[spoil] * 3e38
    optimizer.backward({name: scaler.scale(loss) for name, loss in losses.items()})
    optimizer.balance()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("balancer", [lambda: MARBLE(interval=2), MGDA, NashMTL])
def test_invariant_to_the_loss_scale(balancer: Any) -> None:
    found = []
    for scale in (1.0, 2.0**16):
        model, optimizer, scaler = make(balancer(), scale)
        for seed in range(4):
            step(model, optimizer, scaler, torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert optimizer.info is not None
        assert not optimizer.info.overflow
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spoil", ["a", "c"])
@pytest.mark.parametrize("warm", [0, 2])
def test_overflow_of_one_objective_skips_the_step_and_touches_no_state(spoil: str, warm: int) -> None:
    model, optimizer, scaler = make(MARBLE(interval=2), 2.0**16)
    x = torch.randn(8, 4)
    for _ in range(warm):
        step(model, optimizer, scaler, x)
    state = optimizer.balancer.state_dict()  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, scaler, x, spoil)
    assert optimizer.info is not None
    assert optimizer.info.overflow
    assert summary(optimizer.info)["overflow"] is True
    assert optimizer.balancer.state_dict() == state  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0**15
    step(model, optimizer, scaler, x)
    assert not optimizer.info.overflow
    assert not torch.equal(next(model.parameters()), before[0])


def test_overflow_on_the_first_checked_linear_refresh() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = BalancedOptimizer(inner, MARBLE(), module=model, scaler=scaler)
    for factor, overflow in ((1e38, True), (1.0, False)):
        optimizer.zero_grad()
        terms = scaler.scale(model(torch.randn(8, 4)).square().sum(1) * factor)
        optimizer.backward(AffineLoss.linear(terms, torch.randn(8, 3)))
        assert optimizer.balance().overflow == overflow
        assert optimizer.info is not None
        assert optimizer.info.collector == "linear"
        scaler.step(optimizer)
        scaler.update()


def test_forgetting_balance_is_an_error_not_a_scaled_step() -> None:
    model, optimizer, scaler = make(MARBLE(), 2.0**16)
    losses = model(torch.randn(8, 4)).square().mean(0)
    optimizer.backward(scaler.scale(losses), extra_loss=scaler.scale(model[0].weight.square().sum()))  # type: ignore[index]
    with pytest.raises(StateError, match=r"Call optimizer\.balance\(\) before"):
        scaler.step(optimizer)


def test_without_a_scaler_an_overflow_is_an_error() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.1), MARBLE())
    optimizer.backward({"line": weight.sum(), "root": weight.sum().sqrt()})
    with pytest.raises(NonFiniteError, match=r"\['root'\].*scaler=scaler"):
        optimizer.balance()
    assert weight.grad is None
    with pytest.raises(StateError, match=r"balance\(\) failed in this cycle"):
        optimizer.step()
    with pytest.raises(StateError, match=r"zero_grad\(\)"):
        optimizer.backward({"line": weight.sum(), "root": (weight + 1).sum().sqrt()})
    optimizer.zero_grad()
    optimizer.backward({"line": weight.sum(), "root": (weight + 1).sum().sqrt()})
    optimizer.step()


def test_a_hook_that_raises_leaves_the_balancer_alone_and_is_not_run_on_rows_unscaled_twice() -> None:
    seen: list[Tensor] = []

    def hook(blocks: Any, names: Any) -> None:
        seen.append(torch.cat(list(blocks), 1))
        if len(seen) == 1:
            raise ValueError("once")

    model, optimizer, scaler = make(MARBLE(interval=2), 2.0**10, on_rows=hook)
    x = torch.randn(8, 4)
    with pytest.raises(ValueError, match="once"):
        step(model, optimizer, scaler, x)
    assert optimizer.needs_rows  # a balancer that had been asked would be content
    with pytest.raises(StateError, match=r"balance\(\) failed in this cycle"):
        optimizer.balance()
    step(model, optimizer, scaler, x)
    torch.testing.assert_close(seen[1], seen[0])


def test_a_disabled_scaler_is_no_scaler() -> None:
    model = nn.Linear(4, 3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), MARBLE(), scaler=scaler)
    before = model.weight.detach().clone()
    optimizer.backward(scaler.scale(model(torch.randn(8, 4)).square().mean(0)))
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    with pytest.raises(NonFiniteError):
        optimizer.backward(scaler.scale(model(torch.randn(8, 4)).square().mean(0) * torch.inf))
