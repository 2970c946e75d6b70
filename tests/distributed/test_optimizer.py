"""Training on several ranks is training on one with all their samples, with a wrapper or without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradbalance import MARBLE, MGDA, BalancedOptimizer, Fixed, NashMTL
from gradbalance.distributed import Ranks

BATCH, STEPS = 18, 7


class Model(nn.Module):
    """A trunk, and two heads that get plain gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.heads = nn.ModuleDict({"a": nn.Linear(5, 1), "b": nn.Linear(5, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {name: head(features) for name, head in self.heads.items()}


def losses_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b = outputs["a"], outputs["b"]
    return {"a": a.square().mean(), "b": (b - 1).square().mean(), "mix": 30 * (a * b).mean()}


def batches(step: int) -> Tensor:
    return torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: Model, balancer: Any, **options: Any) -> BalancedOptimizer:
    several = isinstance(balancer, dict)
    groups = [
        {"params": model.trunk[0].parameters(), "balanced": "front" if several else True},
        {"params": model.trunk[2].parameters(), "balanced": "back" if several else True},
        {"params": model.heads.parameters(), "balanced": False},
    ]
    return BalancedOptimizer(torch.optim.SGD(groups, lr=0.05, momentum=0.9), balancer, **options)


BALANCERS: dict[str, Callable[[], Any]] = {
    "MARBLE": lambda: MARBLE(interval=3),
    "MGDA": MGDA,
    "Fixed": lambda: Fixed([1.0, 2.0, 0.5]),
    "groups": lambda: {"front": MARBLE(interval=2), "back": NashMTL(interval=3)},
}


def train(balancer: str, mode: Any, micro: int, wrapper: dict[str, Any] | None, sync: str = "last") -> list[Any]:
    """Parameters and infos of a training in which each rank has its part of every batch."""
    ranks = mode if isinstance(mode, Ranks) else Ranks(mode)
    model = Model()
    forward: nn.Module = model if wrapper is None else DistributedDataParallel(model, **wrapper)
    optimizer = optimizer_of(model, BALANCERS[balancer](), ranks=ranks)
    told = []
    for step in range(STEPS):
        own = batches(step).chunk(ranks.size)[ranks.rank]
        for number, part in enumerate(own.chunk(micro)):
            quiet = wrapper is not None and sync == "last" and number < micro - 1
            with forward.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
                outputs = forward(part)
                losses = {name: loss / micro for name, loss in losses_of(outputs).items()}
                optimizer.backward(losses, extra_loss=1e-2 * sum(p.square().sum() for p in model.parameters()) / micro)
        info = optimizer.balance()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append((info.refreshed, info.losses, info.weights.flatten().tolist(), norm.item()))
    return [torch.cat([p.detach().flatten() for p in model.parameters()]), told]


def agree_with_one_process(found: list[list[Any]], expected: list[Any]) -> None:
    parameters, told = expected
    for own, own_told in found:
        assert torch.equal(own, found[0][0]), "the ranks have drifted apart"
        torch.testing.assert_close(own, parameters, rtol=2e-5, atol=2e-6)
        assert [row[0] for row in own_told] == [row[0] for row in told]
        for mine, other in zip(own_told, told, strict=True):
            assert mine[1] == pytest.approx(other[1], rel=1e-4, abs=1e-6)
            assert mine[2] == pytest.approx(other[2], rel=1e-4, abs=1e-6)
            assert mine[3] == pytest.approx(other[3], rel=1e-4)


def several_trainings(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


CASES: list[tuple[Any, ...]] = [
    *((name, "average", micro, None) for name in BALANCERS for micro in (1, 3)),
    *((name, "ddp", micro, {}) for name in BALANCERS for micro in (1, 3)),
    ("MARBLE", "ddp", 3, {}, "every"),
    ("MARBLE", "ddp", 1, {"gradient_as_bucket_view": True}),
    ("groups", Ranks("average", reduction="reduce_scatter"), 1, None),
    ("MARBLE", Ranks("ddp", reduction="reduce_scatter"), 3, {}),
]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_as_one_process_does(on_ranks: Any, size: int) -> None:
    found = on_ranks(size, several_trainings, CASES)
    for number, case in enumerate(CASES):
        expected = train(case[0], "average", case[2], None)
        agree_with_one_process([rank[number] for rank in found], expected)
