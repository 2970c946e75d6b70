"""The hook that sees the rows on their way."""

from __future__ import annotations

import pytest
import torch

import gradbalance as gb
from grouped_model import Net, batch, grouped


@pytest.mark.parametrize("single", [False, True])
def test_on_rows_sees_the_rows_of_refreshes(single: bool) -> None:
    model, seen = Net(), []
    options = {"on_rows": lambda rows, names: seen.append((torch.cat(list(rows), 1), names))}
    if single:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = gb.BalancedOptimizer(inner, gb.MARBLE(interval=2), **options)  # type: ignore[arg-type]
    else:
        optimizer = grouped(model, gb.MARBLE(interval=2), gb.MARBLE(interval=2), **options)
    for seed in range(4):
        optimizer.zero_grad()
        optimizer.backward(model.losses(batch(seed)))
        info = optimizer.balance()
        assert len(seen) == 1 + seed // 2
        if info.refreshed:
            torch.testing.assert_close(gb.gramian(seen[-1][0]), info.gram)
            assert seen[-1][1] == info.names
        optimizer.step()


def test_on_rows_feeds_a_conflict_meter() -> None:
    model, meter, other = Net(), gb.ConflictMeter(groups=3), gb.ConflictMeter(groups=3)
    optimizer = grouped(model, gb.MGDA(), gb.MGDA(), on_rows=meter.update)
    for seed in range(5):
        parameters = [*model.encoder.parameters(), *model.decoder.parameters()]
        other.measure(model.losses(batch(seed)), parameters)
        optimizer.zero_grad()
        optimizer.backward(model.losses(batch(seed)))
        optimizer.step()
    assert meter.batches == 5
    torch.testing.assert_close(meter.cosines(), other.cosines(), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_on_rows_must_be_callable() -> None:
    with pytest.raises(gb.InvalidArgumentError, match="on_rows must be callable, found ConflictMeter"):
        grouped(Net(), gb.MGDA(), gb.MGDA(), on_rows=gb.ConflictMeter())
