"""Parameters sharded by FSDP2 (fully_shard): rows stay in shards, and the training is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from gradbalance import (
    MARBLE,
    MGDA,
    BalancedOptimizer,
    CollectorError,
    Fixed,
    NonFiniteError,
    RanksError,
    backward,
)
from gradbalance.distributed import Ranks, world_size
from gradbalance.distributed.collectives import gather


class Model(nn.Module):
    """Widths that two and three ranks share unevenly; a checkpointed block; a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(4, 7)
        self.block = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        return self.head(checkpoint(self.block, x, use_reentrant=False))  # type: ignore[no-any-return]


def shard(model: Model, reshard: bool = True) -> Model:
    for layer in (model.embed, model.block):
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model


def losses_of(y: Tensor) -> dict[str, Tensor]:
    return {"a": y[:, 0].square().mean(), "b": (y[:, 1] - 1).square().mean(), "c": 20 * (y[:, 2] * y[:, 0]).mean()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


BALANCERS: dict[str, Any] = {
    "MARBLE": lambda: MARBLE(interval=2),
    "Fixed": lambda: Fixed([1.0, 2.0, 3.0]),
    "groups": lambda: {"first": MGDA(), "second": MARBLE(interval=2)},
    "two weightings": lambda: {"first": Fixed([1.0, 1.0, 2.0]), "second": Fixed([3.0, 2.0, 1.0])},
}


def train(balancer: str, head: bool, reshard: bool = True) -> list[Any]:
    model, sharded = Model(), world_size() > 1
    if sharded:
        shard(model, reshard)
    several = "gro" in balancer or "two" in balancer
    groups = [
        {"params": model.embed.parameters(), "balanced": "first" if several else True},
        {"params": model.block.parameters(), "balanced": "second" if several else True},
        {"params": model.head.parameters(), "balanced": ("second" if several else True) if head else False},
    ]
    optimizer = BalancedOptimizer(
        torch.optim.AdamW(groups, lr=0.02), BALANCERS[balancer](), ranks="fsdp" if sharded else None
    )
    told = []
    for step in range(4):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(world_size())[dist.get_rank() if sharded else 0].chunk(2):
            y = model(part)
            optimizer.backward({n: loss / 2 for n, loss in losses_of(y).items()}, extra_loss=0.01 * y.square().mean())
        info = optimizer.balance()
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)).item()
        told.append([norm, *info.losses.values(), *info.weights.flatten().tolist()])
        optimizer.step()
        optimizer.zero_grad()
    return [torch.cat([whole(p.detach()).flatten() for p in model.parameters()]).tolist(), told]


CASES = [(name, head, True) for name in BALANCERS for head in (True, False)] + [("MARBLE", False, False)]


def all_trainings() -> list[Any]:
    return [train(*case) for case in CASES]


@pytest.mark.parametrize("size", [2, 3])
def test_shards_train_as_one_process_does(on_ranks: Any, size: int) -> None:
    found = on_ranks(size, all_trainings)
    for case, *every, expected in zip(CASES, *found, all_trainings(), strict=True):
        for mine in every:
            assert mine == every[0], case
        assert every[0][0] == pytest.approx(expected[0], rel=1e-3, abs=1e-4), case
        for own, reference in zip(every[0][1], expected[1], strict=True):
            assert own == pytest.approx(reference, rel=1e-3, abs=1e-4), case


def function() -> list[float]:
    model = shard(Model()) if world_size() > 1 else Model()
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    y = model(x.chunk(world_size())[dist.get_rank() if world_size() > 1 else 0])
    info = backward(losses_of(y), model.parameters(), MGDA(), ranks="fsdp" if world_size() > 1 else None)
    assert info.gram is not None
    assert info.collector == "passes"
    if world_size() > 1:
        assert info.collector_reason == "the parameters are sharded (FSDP2)"
    gradients = [whole(p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return [*info.gram.flatten().tolist(), *torch.cat(gradients).tolist()]


def test_partial_gramians_of_shards_add_up(on_ranks: Any) -> None:
    first, second = on_ranks(2, function)
    assert first == second == pytest.approx(function(), rel=1e-4, abs=1e-6)


def refusals() -> list[str]:
    told: list[str] = []

    def raises(error: type[Exception], model: Model, ranks: Any, y: Tensor | None = None, **options: Any) -> None:
        optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), MGDA(), ranks=ranks, **options)
        with pytest.raises(error) as caught:
            optimizer.backward(losses_of(model(torch.ones(2, 4)) if y is None else y))
        told.append(str(caught.value))

    raises(RanksError, shard(Model()), "average")
    raises(RanksError, shard(Model()), None)
    partly = Model()
    fully_shard(partly.embed)
    raises(RanksError, partly, "fsdp")
    raises(CollectorError, shard(Model()), "fsdp", collector="linear")
    raises(RanksError, shard(Model()), "fsdp", on_rows=print)
    both = Model()
    fully_shard(both, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    raises(RanksError, both, "fsdp")
    waiting = shard(Model())
    waiting.set_requires_gradient_sync(False)  # type: ignore[operator]
    raises(CollectorError, waiting, "fsdp")
    return told


def test_what_is_not_supported_is_refused_with_the_reason(on_ranks: Any) -> None:
    found = on_ranks(2, refusals)
    assert found[0] == found[1]
    for message, part in zip(
        found[0],
        [
            "ranks='average' takes whole parameters, found 8 of 8 sharded (DTensor): pass ranks='fsdp'",
            "ranks must be given",
            "ranks='fsdp' takes parameters sharded by fully_shard, found 6 of 8 that are not",
            "collector 'linear' cannot collect these rows: the parameters are sharded (FSDP2)",
            "on_rows takes whole rows",
            "one mesh dimension",
            "set_requires_gradient_sync(False)",
        ],
        strict=True,
    ):
        assert part in message


def skipped() -> list[Any]:
    told = []
    for balancer in (MGDA(), Fixed([1.0, 1.0, 1.0])):
        model = shard(Model())
        optimizer = BalancedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer, ranks=Ranks("fsdp"), on_nonfinite="skip"
        )
        before = [p.detach().to_local().clone() for p in model.parameters()]
        for step in range(2):
            losses = losses_of(model(torch.ones(2, 4)))
            if step == 0 and dist.get_rank() == 1:
                losses["b"] = losses["b"] * float("nan")
            optimizer.backward(losses)
            told.append(optimizer.balance().skipped)
            optimizer.step()
            if step == 0:
                assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
            optimizer.zero_grad()
    optimizer = BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), MGDA(), ranks="fsdp")
    losses = losses_of(model(torch.ones(2, 4)))
    losses["c"] = losses["c"] / dist.get_rank() if dist.get_rank() else losses["c"] * float("inf")
    optimizer.backward(losses)
    with pytest.raises(NonFiniteError, match="'c'"):
        optimizer.balance()
    return told


def test_one_ranks_nan_skips_the_cycle_on_all(on_ranks: Any) -> None:
    first, second = on_ranks(2, skipped)
    assert first == second == [("b",), (), ("b",), ()]


def empty_shards() -> list[bool]:
    """More ranks than rows of a weight: a rank holds nothing of it."""
    model = nn.Linear(3, 1)
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    fully_shard(model)
    parameters = list(model.parameters())
    y = model(torch.ones(2, 3) * (1 + dist.get_rank()))
    losses = {"a": y.mean(), "b": y.square().mean()}
    with pytest.raises(RanksError, match="before a forward, which puts gathered copies in their place"):
        backward(losses, model.parameters(), MGDA(), ranks="fsdp")
    backward(losses, parameters, MGDA(), ranks="fsdp")
    assert model.weight.grad is not None
    every = gather(whole(model.weight.grad), None)
    return [p.to_local().numel() == 0 for p in model.parameters()] + [torch.equal(every[0], every[1])]


def test_a_rank_without_a_shard(on_ranks: Any) -> None:
    first, second = on_ranks(2, empty_shards)
    assert first == [False, False, True]
    assert second == [True, True, True]
