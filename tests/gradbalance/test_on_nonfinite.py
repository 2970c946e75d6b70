"""Skipping cycles with NaN or Inf: nothing moves, it is counted, and training goes on as if they had not been."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from breaking import Breaking
from gradbalance import (
    MARBLE,
    MGDA,
    AffineLoss,
    BalancedOptimizer,
    InvalidArgumentError,
    Mean,
    NashMTL,
    NonFiniteError,
    StateError,
    summary,
)

BAD = [math.nan, math.inf, -math.inf]


def make(balancer: Any = None, **options: Any) -> tuple[nn.Sequential, BalancedOptimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inner = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "balanced": False}], lr=0.1
    )
    options.setdefault("on_nonfinite", "skip")
    return model, BalancedOptimizer(inner, MARBLE(interval=2) if balancer is None else balancer, **options)


def losses_of(model: nn.Module, x: Tensor, spoil: dict[str, float] | None = None) -> dict[str, Tensor]:
    y = model(x)
    factors = spoil or {}
    return {name: y[:, k].square().mean() * factors.get(name, 1.0 + k) for k, name in enumerate("abc")}


def batch(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def everything(model: nn.Module, optimizer: BalancedOptimizer) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    # The only things that a skipped cycle may leave behind: the count, and what the objectives are called.
    del state["balancer"]["skipped"], state["balancer"]["names"]
    return [p.detach().tolist() for p in model.parameters()], repr(state)


def step(model: nn.Module, optimizer: BalancedOptimizer, seed: int) -> None:
    optimizer.zero_grad()
    optimizer.backward(losses_of(model, batch(seed)))
    optimizer.step()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("warm", [0, 1, 2])
@pytest.mark.parametrize("balancer", [lambda: MARBLE(interval=2), NashMTL, MGDA, Mean])
def test_a_bad_loss_moves_nothing_and_is_counted(bad: float, warm: int, balancer: Any) -> None:
    """On the first refresh, on a cached step, on a later refresh."""
    model, optimizer = make(balancer())
    for seed in range(warm):
        step(model, optimizer, seed)
    before, due = everything(model, optimizer), optimizer.needs_rows
    optimizer.zero_grad()
    optimizer.backward(losses_of(model, batch(9), {"b": bad}))
    info = optimizer.balance()
    assert info.skipped == ("b",)
    assert not info.refreshed
    assert info.weights.tolist() == [0, 0, 0]
    assert math.isfinite(info.losses["a"])
    assert not math.isfinite(info.losses["b"])
    assert all(p.grad is None for p in model.parameters())
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.skipped == 1
    assert optimizer.needs_rows is due
    assert optimizer.info is info
    assert summary(info)["skipped"] is True


def test_training_goes_on_as_if_the_cycle_had_not_been() -> None:
    (model, optimizer), (other, reference) = make(), make()
    for seed in range(6):
        if seed in (0, 1, 3):
            optimizer.zero_grad()
            optimizer.backward(losses_of(model, batch(50 + seed), {"c": math.nan}))
            optimizer.step()
        step(model, optimizer, seed)
        step(other, reference, seed)
    assert everything(model, optimizer) == everything(other, reference)
    assert (optimizer.skipped, reference.skipped) == (3, 0)
    assert summary(optimizer.info)["skipped"] is False  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("warm", [0, 1])
def test_one_bad_micro_batch_spoils_its_cycle_wherever_it_stands(place: int, warm: int) -> None:
    model, optimizer = make()
    for seed in range(warm):
        step(model, optimizer, seed)
    before = everything(model, optimizer)
    optimizer.zero_grad()
    for k in range(3):
        optimizer.backward(losses_of(model, batch(k), {"a": math.inf, "c": math.nan} if k == place else None))
    optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.info is not None
    assert optimizer.info.skipped == ("a", "c")
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.skipped == 1


def test_a_bad_row_behind_a_finite_loss_is_named() -> None:
    model, optimizer = make()
    before = everything(model, optimizer)
    shared = model[0](batch(0)).tanh()
    optimizer.backward({"good": shared.square().mean(), "bad": Breaking.apply(shared.mean())})
    optimizer.step()
    assert optimizer.info is not None
    assert optimizer.info.skipped == ("bad",)
    assert optimizer.skipped == 1
    assert everything(model, optimizer)[0] == before[0]


def test_a_bad_gradient_on_a_cached_step() -> None:
    model, optimizer = make()
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    optimizer.zero_grad()
    optimizer.backward({n: Breaking.apply(v) if n == "b" else v for n, v in losses_of(model, batch(1)).items()})
    optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.info is not None
    assert optimizer.info.skipped == ("a", "b", "c")  # their sum alone was formed


@pytest.mark.parametrize("warm", [0, 1])
def test_bad_heads_and_foreign_leaves_under_good_rows(warm: int) -> None:
    """The balancer is not asked either: its average would move without a step."""
    model, optimizer = make()
    foreign = nn.Parameter(torch.ones(()))
    for seed in range(warm):
        step(model, optimizer, seed)
    before = everything(model, optimizer)
    optimizer.zero_grad()
    y = model[2](model[0](batch(0)).tanh())
    optimizer.backward({n: y[:, k].mean() + Breaking.apply(foreign) for k, n in enumerate("abc")})
    optimizer.step()
    assert everything(model, optimizer) == before
    assert foreign.grad is None
    assert optimizer.skipped == 1


def test_a_bad_extra_loss_is_named() -> None:
    model, optimizer = make()
    losses = losses_of(model, batch(0))
    optimizer.backward(losses, extra_loss=losses["a"] * math.nan)
    assert optimizer.balance().skipped == ("extra_loss",)


def test_sparse_gradients_are_looked_at() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = BalancedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), Mean(), on_nonfinite="skip")
    for factor, skipped in ((1.0, 0), (math.nan, 1)):
        optimizer.zero_grad()
        found = table(torch.tensor([1, 1]))
        losses = [found.sum(), found.square().sum()]
        optimizer.backward([Breaking.apply(loss) if math.isnan(factor) else loss for loss in losses])
        optimizer.step()
        assert optimizer.skipped == skipped
    assert torch.isfinite(table.weight).all()


def test_recorded_affine_losses_are_skipped_too() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = BalancedOptimizer(inner, MARBLE(interval=2), module=model, on_nonfinite="skip")
    advantages = torch.randn(8, 3)
    for k in range(6):
        optimizer.zero_grad()
        terms = model(batch(k)).squeeze(1)
        optimizer.backward(AffineLoss.linear(terms * (math.nan if k in (0, 3) else 1.0), advantages))
        info = optimizer.balance()
        assert bool(info.skipped) is (k in (0, 3))
        assert info.collector == {1: "linear", 4: "linear"}.get(k)
        optimizer.step()
        assert not any("forward" in layer.__dict__ for layer in model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_calls_after_a_skip_keep_their_order() -> None:
    model, optimizer = make()
    optimizer.backward(losses_of(model, batch(0), {"a": math.nan}))
    optimizer.balance()
    optimizer.balance()
    assert optimizer.skipped == 1
    with pytest.raises(StateError, match="after balance"):
        optimizer.backward(losses_of(model, batch(0)))
    optimizer.step()
    with pytest.raises(StateError, match="first"):
        optimizer.step()


def test_schedulers_go_on() -> None:
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.backward(losses_of(model, batch(0), {"a": math.nan}))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_count_is_part_of_the_state() -> None:
    model, optimizer = make()
    optimizer.backward(losses_of(model, batch(0), {"a": math.nan}))
    optimizer.step()
    saved = optimizer.state_dict()
    assert json.loads(json.dumps(saved["balancer"])) == saved["balancer"]
    _, resumed = make()
    resumed.load_state_dict(saved)
    assert resumed.skipped == 1


def test_raising_is_the_default() -> None:
    model, optimizer = make(on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match="'a'"):
        optimizer.backward(losses_of(model, batch(0), {"a": math.nan}))
    assert optimizer.skipped == 0


def test_a_balancer_that_gives_nan_is_a_fault_and_not_skipped() -> None:
    model, optimizer = make(lambda gram: gram.diagonal() * math.nan)
    optimizer.backward(losses_of(model, batch(0)))
    with pytest.raises(NonFiniteError, match="for a finite Gramian"):
        optimizer.step()


def test_not_together_with_a_scaler() -> None:
    with pytest.raises(InvalidArgumentError, match="on_nonfinite must be 'raise' with a scaler"):
        make(scaler=torch.amp.GradScaler("cpu"))
    make(scaler=torch.amp.GradScaler("cpu", enabled=False))


def test_another_policy_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="on_nonfinite must be 'raise' or 'skip', found 'zero'"):
        make(on_nonfinite="zero")
