"""Counts, samples and numbers of all ranks; masked objectives whose valid samples lie unevenly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradbalance import (
    MARBLE,
    MGDA,
    AffineLoss,
    BalancedOptimizer,
    Fixed,
    InvalidArgumentError,
    RanksError,
    backward,
    summary,
)
from gradbalance.distributed import gather_samples, global_counts, mean_metrics, world_size

# Rank 0 has 3 samples, rank 1 has 5 and none for the third objective; nobody has any for the fourth.
PARTS = (slice(0, 3), slice(3, 8))
MASK = torch.tensor(
    [[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
).bool()
NAMES = ("all", "few", "first rank", "nowhere")


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, generator=generator).double(), torch.rand(8, 4, generator=generator).double()


def masked_training(kind: str, mode: str) -> tuple[list[float], list[dict[str, Any]], list[str]]:
    """A training with masks, of this rank's part of the samples."""
    x, r = data()
    world = world_size()
    part = PARTS[dist.get_rank()] if world > 1 else slice(0, 8)
    mask = MASK[part]
    model = make_model()
    wrapped = DistributedDataParallel(model) if mode == "ddp" and world > 1 else model
    balancer = Fixed([1.0, 2.0, 3.0, 4.0]) if kind == "fixed" else MARBLE(interval=2)
    optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer, ranks=mode, module=wrapped)
    told, collectors = [], []
    for _ in range(3):
        counts = global_counts(mask)
        y = wrapped(x[part])
        positive, negative = y[:, 0].square(), (y[:, 1] - 1).square()
        extra = None
        if kind == "linear":
            loss = AffineLoss.linear(positive + negative, r[part], mask, counts, NAMES, world_size=world)
        else:
            center = kind == "centered"
            loss = AffineLoss.interpolate(positive, negative, r[part], mask, counts, center, 8, NAMES, world_size=world)
            extra = loss.common
        optimizer.backward(loss, extra_loss=extra)
        info = optimizer.balance()
        optimizer.step()
        optimizer.zero_grad()
        told.append({"losses": info.losses, "inactive": info.inactive, "weights": info.weights.tolist()})
        collectors.append(info.collector or "")
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), told, collectors


KINDS = ("linear", "interpolated", "centered", "fixed")


def all_trainings() -> list[Any]:
    return [masked_training(kind, mode) for kind in KINDS for mode in ("average", "ddp")]


def test_masked_objectives_are_means_over_the_samples_of_all_ranks(on_ranks: Any) -> None:
    first, second = on_ranks(2, all_trainings)
    for mine, other, expected in zip(first, second, all_trainings(), strict=True):
        assert mine[0] == other[0]
        assert mine[0] == pytest.approx(expected[0], rel=1e-9)
        assert mine[2] == expected[2]
        for own, reference in zip(mine[1], expected[1], strict=True):
            assert own["losses"] == pytest.approx(reference["losses"], rel=1e-9)
            assert own["weights"] == pytest.approx(reference["weights"], rel=1e-7)
            assert own["inactive"] == reference["inactive"] == ("nowhere",)
    assert "linear" in first[0][2]


def losses_by_hand() -> list[float]:
    """Without an AffineLoss: the rank's sum, times W over the count."""
    x, r = data()
    part = PARTS[dist.get_rank()] if world_size() > 1 else slice(0, 8)
    counts = global_counts(MASK[part])
    model = make_model()
    per_sample = model(x[part]).square().sum(1)
    losses = {
        name: world_size() * (MASK[part, k] * r[part, k] * per_sample).sum() / counts[k].clamp(min=1)
        for k, name in enumerate(NAMES)
    }
    info = backward(losses, model.parameters(), MGDA(normalize=True), ranks="average")
    return [*info.losses.values(), *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)]


def test_masked_losses_written_by_hand(on_ranks: Any) -> None:
    first, second = on_ranks(2, losses_by_hand)
    assert first == second == pytest.approx(losses_by_hand(), rel=1e-9)


def test_counts_of_all_ranks_are_asked_for() -> None:
    with pytest.raises(InvalidArgumentError, match="counts must be those of all ranks with world_size = 2, found None"):
        AffineLoss.linear(torch.ones(2), torch.ones(2, 1), world_size=2)
    with pytest.raises(InvalidArgumentError, match="world_size must be a number of ranks"):
        AffineLoss.interpolate(torch.ones(2), torch.ones(2), torch.ones(2, 1), world_size=0)
    with pytest.raises(InvalidArgumentError, match=r"mask must be a bool tensor of shape \[B, K\]"):
        global_counts(torch.ones(2, 2))


def gathered() -> dict[str, Any]:
    rank = dist.get_rank()
    own = torch.arange(3.0 * (2 * rank)).reshape(2 * rank, 3) + 100 * rank
    found = {
        "unequal": gather_samples(own).tolist(),
        "bool": gather_samples(torch.tensor([rank == 0])).tolist(),
        "int": gather_samples(torch.full((2 - rank,), 2**40 + rank)).tolist(),
        "nobody": list(gather_samples(torch.empty(0, 4)).shape),
        "counts": global_counts(torch.ones(rank, 2, dtype=torch.bool)).tolist(),
    }
    for other in (torch.ones(1, 2 + rank), torch.ones(1, dtype=[torch.float32, torch.float64][rank])):
        with pytest.raises(RanksError, match="one dtype and shape"):
            gather_samples(other)
    return found


def test_samples_of_unequal_and_empty_ranks_are_gathered(on_ranks: Any) -> None:
    first, second = on_ranks(2, gathered)
    assert first == second
    assert first["unequal"] == [[100, 101, 102], [103, 104, 105]]
    assert first["bool"] == [True, False]
    assert first["int"] == [2**40, 2**40, 2**40 + 1]
    assert first["nobody"] == [0, 4]
    assert first["counts"] == [1, 1]
    with pytest.raises(InvalidArgumentError, match="must have a first dimension"):
        gather_samples(torch.tensor(1.0))


def averaged() -> dict[str, float]:
    """Keys in another order on each rank, one of them on one rank only, NaN on one and on all."""
    if dist.get_rank() == 0:
        return mean_metrics({"ocr": 0.5, "pick": 1.0, "gone": math.nan, "late": math.nan})
    return mean_metrics({"late": 4.0, "gone": math.nan, "pick": 3.0})


def test_metrics_on_unequal_keys_do_not_hang(on_ranks: Any) -> None:
    for found in on_ranks(2, averaged):
        assert list(found) == ["gone", "late", "ocr", "pick"]
        assert math.isnan(found.pop("gone"))
        assert found == {"late": 4.0, "ocr": 0.5, "pick": 2.0}


def keys_of_summaries() -> list[list[str]]:
    """Every rank logs the same keys in every cycle, also where one objective has no sample on it."""
    model = make_model()
    optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), MARBLE(interval=2), ranks="average")
    x, r = data()
    part = PARTS[dist.get_rank()]
    keys = []
    for _ in range(3):
        terms = model(x[part]).square().sum(1)
        counts = global_counts(MASK[part])
        optimizer.backward(AffineLoss.linear(terms, r[part], MASK[part], counts, NAMES, world_size=2))
        keys.append(list(summary(optimizer.balance())))
        optimizer.step()
        optimizer.zero_grad()
    return keys


def test_summaries_have_the_same_keys_on_all_ranks(on_ranks: Any) -> None:
    first, second = on_ranks(2, keys_of_summaries)
    assert first == second
