"""BalancedOptimizer that records its module when rows are due."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbalance import (
    MARBLE,
    AffineLoss,
    CollectorError,
)
from small_model import flat, make_model, sgd


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 4)


def test_module_is_recorded_when_rows_are_due_and_only_then(x: Tensor) -> None:
    model = make_model()
    optimizer = sgd(model, MARBLE(interval=2), module=model)
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            with torch.no_grad():
                model(x)
            y = checkpoint(model, x, use_reentrant=False) if step % 3 == 0 else model(x)
            assert ("forward" in model[0].__dict__) == (step % 2 == 0)
            optimizer.backward(AffineLoss.linear(y.square().sum(1), torch.randn(8, 4)), extra_loss=y.mean())
        info = optimizer.balance()
        assert info.collector == (None if step % 2 else "linear")
        assert "forward" not in model[0].__dict__
        optimizer.step()


def test_linear_and_passes_train_alike(x: Tensor) -> None:
    found = []
    for collector in ("linear", "passes"):
        model = make_model().double()
        optimizer = sgd(model, MARBLE(interval=2), module=model, collector=collector)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            optimizer.zero_grad()
            advantages = torch.randn(8, 4, generator=generator)
            optimizer.backward(AffineLoss.linear(model(x.double()).square().sum(1), advantages))
            optimizer.step()
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_dropped_optimizer_neither_lives_nor_records(x: Tensor) -> None:
    model = make_model()
    optimizer = sgd(model, MARBLE(), module=model)
    model(x)
    assert "forward" in model[0].__dict__
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert "forward" not in model[0].__dict__
    assert not model._forward_pre_hooks


def test_first_refresh_is_checked_unless_told_otherwise() -> None:
    def cycle(check: bool) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
        optimizer = sgd(model, MARBLE(), module=model, check_first_refresh=check)
        optimizer.backward(AffineLoss.linear(model(torch.randn(8, 3)).square().squeeze(1), torch.randn(8, 4)))

    with pytest.raises(CollectorError, match="disagree"):
        cycle(True)
    cycle(False)


def test_only_fresh_rows_are_checked(x: Tensor) -> None:
    """A first micro-batch that bypasses the module is collected by passes; its rows must not disturb the check."""
    model = make_model()
    optimizer = sgd(model, MARBLE(), module=model)
    for forward in (lambda: model[2](model[1](model[0](x + 1))), lambda: model(x)):
        optimizer.backward(AffineLoss.linear(forward().square().sum(1), torch.randn(8, 4)))
    info = optimizer.balance()
    assert info.collector == "passes"
    assert "'0.weight'" in info.collector_reason or "not recorded" in info.collector_reason


def test_an_empty_micro_batch_counts_as_nothing(x: Tensor) -> None:
    """A rank or a micro-batch may hold no sample."""
    advantages, found = torch.randn(8, 4), []
    for parts in ([x], [x[:0], x]):
        model = make_model()
        optimizer = sgd(model, MARBLE(), module=model)
        for part in parts:
            optimizer.backward(AffineLoss.linear(model(part).square().sum(1), advantages[: len(part)], counts=[8] * 4))
        found.append(optimizer.balance())
        assert found[-1].collector == "linear"
    torch.testing.assert_close(found[0].gram, found[1].gram)
