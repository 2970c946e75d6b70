"""Under accelerate on a CPU: preparing, accumulation, clipping, and the loss scale of fp16 as it drives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbalance import MARBLE, MGDA, BalancedOptimizer, InvalidArgumentError, Mean
from small_model import flat, losses_of, make_model, sgd

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _no_state_left_behind() -> Iterator[None]:
    """The library keeps one state per process: each test makes its own."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def batch(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("balancer", [lambda: MARBLE(interval=2), MGDA, Mean])
def test_accumulation_and_clipping_are_those_of_a_loop_by_hand(balancer: Any) -> None:
    """Two micro-batches to a step: `accumulate` holds back step and zero_grad after the first."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = sgd(model, balancer())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    prepared_model, prepared, prepared_schedule = accelerator.prepare(model, optimizer, schedule)
    norms = []
    for seed in range(8):
        with accelerator.accumulate(prepared_model):
            optimizer.backward({name: loss / 2 for name, loss in losses_of(prepared_model, batch(seed)).items()})
            if accelerator.sync_gradients:
                optimizer.balance()
                norms.append(accelerator.clip_grad_norm_(prepared_model.parameters(), 0.1))
            prepared.step()
            prepared_schedule.step()
            prepared.zero_grad()

    other = make_model()
    by_hand = sgd(other, balancer())
    expected = []
    for step in range(4):
        for seed in (2 * step, 2 * step + 1):
            by_hand.backward({name: loss / 2 for name, loss in losses_of(other, batch(seed)).items()})
        by_hand.balance()
        expected.append(nn.utils.clip_grad_norm_(other.parameters(), 0.1))
        by_hand.step()
        for group in by_hand.param_groups:
            group["lr"] *= 0.5
        by_hand.zero_grad()
    assert torch.equal(flat(model), flat(other))
    assert torch.equal(torch.stack(norms), torch.stack(expected))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


def scaled(scale: float) -> tuple[nn.Module, BalancedOptimizer, Any, torch.amp.GradScaler]:
    """What `Accelerator(mixed_precision="fp16")` builds on a GPU, with a scaler for the CPU."""
    accelerate.Accelerator(cpu=True)
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = sgd(model, MARBLE(interval=2), scaler=scaler)
    return model, optimizer, accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler), scaler


def scaled_step(
    model: nn.Module,
    optimizer: BalancedOptimizer,
    prepared: Any,
    scaler: torch.amp.GradScaler,
    seed: int,
    factor: float = 1.0,
) -> None:
    losses = losses_of(model, batch(seed))
    losses["b"] = losses["b"] * factor
    optimizer.backward({name: scaler.scale(loss) for name, loss in losses.items()})
    optimizer.balance()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    prepared.step()
    prepared.zero_grad()


@pytest.mark.parametrize(("warm", "refresh"), [(2, True), (3, False)])
def test_the_loss_scale_changes_nothing_and_an_overflow_skips_the_step(warm: int, refresh: bool) -> None:
    found = []
    for scale in (1.0, 2.0**16):
        model, optimizer, prepared, scaler = scaled(scale)
        for seed in range(warm):
            scaled_step(model, optimizer, prepared, scaler, seed)
            assert not prepared.step_was_skipped
        before, state = flat(model), optimizer.state_dict()["balancer"]
        scaled_step(model, optimizer, prepared, scaler, 3, factor=torch.inf)
        assert prepared.step_was_skipped
        assert optimizer.info is not None
        assert optimizer.info.overflow is refresh
        assert torch.equal(flat(model), before)
        assert optimizer.state_dict()["balancer"] == state
        assert scaler.get_scale() == scale / 2
        scaled_step(model, optimizer, prepared, scaler, 4)
        assert not prepared.step_was_skipped
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_a_prepared_optimizer_is_not_wrapped_again() -> None:
    """The order is: balance the plain optimizer, then prepare it."""
    model = make_model()
    accelerator = accelerate.Accelerator(cpu=True)
    _, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgumentError, match=r"accelerator\.prepare\(BalancedOptimizer"):
        BalancedOptimizer(prepared, Mean())
