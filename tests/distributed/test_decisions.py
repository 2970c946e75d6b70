"""What one rank alone knows or draws, all ranks act on: NaN, overflow, random weights, parameters that it reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchjd.aggregation import RandomWeighting

from breaking import Breaking
from gradbalance import MARBLE, MGDA, BalancedOptimizer, ConflictMeter, Fixed, RanksError, StateError, backward, gramian
from gradbalance.distributed.collectives import gather


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def outputs_of(model: nn.Module, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(5, 3, generator=generator))  # type: ignore[no-any-return]


def losses_of(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    y = outputs_of(model, step)
    return {"a": y[:, 0].square().mean(), "b": (y[:, 1] - 1).square().mean()}


def optimizer_of(model: nn.Module, balancer: Any, **options: Any) -> BalancedOptimizer:
    return BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer, **options)


def same_on_all_ranks(tensor: Tensor) -> bool:
    every = gather(tensor.detach(), None)
    return torch.equal(every, every[:1].expand_as(every))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- skipping


def skipping(mode: str) -> list[Any]:
    """NaN in a loss, in a row, in the gradient of the extra loss: on rank 1 only, in cycles with rows and without."""
    told = []
    for where in ("loss", "row", "extra", "extra gradient"):
        for balancer in (MGDA(), Fixed([1.0, 1.0])):
            model = make_model()
            wrapped = DistributedDataParallel(model) if mode == "ddp" else model
            optimizer = optimizer_of(model, balancer, ranks=mode, on_nonfinite="skip")
            before = flat(model)
            for micro in range(2):
                # Everything goes through the forward: the reducer of DDP waits for each parameter.
                y = outputs_of(wrapped)
                losses = {"a": y[:, 0].square().mean(), "b": (y[:, 1] - 1).square().mean()}
                extra = flat_norm = sum(p.square().sum() for p in model.parameters())
                if dist.get_rank() == 1 and micro == 0:
                    if where == "loss":
                        losses["b"] = losses["b"] * float("nan")
                    elif where == "row":
                        losses["b"] = Breaking.apply(losses["b"])
                    elif where == "extra":
                        extra = flat_norm * float("inf")
                    else:
                        extra = Breaking.apply(flat_norm)
                optimizer.backward(losses, extra_loss=extra)
            info = optimizer.balance()
            told.append((where, type(balancer).__name__, info.skipped))
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            assert torch.equal(flat(model), before)
            optimizer.zero_grad()
            for step in range(2):
                optimizer.backward(losses_of(wrapped, step))
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.skipped == 1
            assert not torch.equal(flat(model), before)
            assert same_on_all_ranks(flat(model))
    return told


@pytest.mark.parametrize("mode", ["average", "ddp"])
def test_one_ranks_nan_skips_the_cycle_on_all(on_ranks: Any, mode: str) -> None:
    first, second = on_ranks(2, skipping, mode)
    assert first == second
    whole = ("a", "b")
    assert first == [
        ("loss", "MGDA", ("b",)),
        ("loss", "Fixed", ("b",)),
        ("row", "MGDA", ("b",)),
        ("row", "Fixed", whole),
        ("extra", "MGDA", ("extra_loss",)),
        ("extra", "Fixed", ("extra_loss",)),
        ("extra gradient", "MGDA", whole),
        ("extra gradient", "Fixed", whole),
    ]


def skipping_with_a_head_outside() -> list[Any]:
    """The head is in no group of the optimizer; rank 1 knows after its first micro-batch that the cycle is lost."""
    told = []
    for balancer in (MGDA(), Fixed([1.0, 1.0])):
        model = make_model()
        head = nn.Linear(2, 2)
        head.weight.grad = torch.ones(2, 2)
        optimizer = optimizer_of(model, balancer, ranks="average", on_nonfinite="skip")
        y = head(outputs_of(model))
        losses = {"a": y[:, 0].square().mean(), "b": y[:, 1].square().mean()}
        if dist.get_rank() == 1:
            losses["b"] = losses["b"] * float("nan")
        optimizer.backward(losses)
        told.append((optimizer.balance().skipped, head.weight.grad is None))
    return told


def test_skipping_with_parameters_outside_the_optimizer(on_ranks: Any) -> None:
    first, second = on_ranks(2, skipping_with_a_head_outside)
    assert first == second == [(("b",), True)] * 2


def overflow(mode: str) -> list[Any]:
    """Float16 is not needed for an overflow: a loss scaled beyond float32 is one."""
    model = make_model()
    wrapped = DistributedDataParallel(model) if mode == "ddp" else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = optimizer_of(model, MARBLE(interval=2), ranks=mode, scaler=scaler)
    told = []
    for step in range(4):
        losses = losses_of(wrapped, step)
        if step == 2 and dist.get_rank() == 1:
            losses["a"] = losses["a"] * 1e38
        before = flat(model)
        optimizer.backward({name: scaler.scale(loss) for name, loss in losses.items()})
        info = optimizer.balance()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append((info.refreshed, info.overflow, scaler.get_scale(), bool((flat(model) != before).any())))
        assert same_on_all_ranks(flat(model))
    return told


@pytest.mark.parametrize("mode", ["average", "ddp"])
def test_one_ranks_overflow_skips_the_step_on_all(on_ranks: Any, mode: str) -> None:
    first, second = on_ranks(2, overflow, mode)
    assert first == second
    assert [row[1] for row in first] == [False, False, True, False]
    assert [row[3] for row in first] == [True, True, False, True]
    assert first[2][2] == first[1][2] / 2


# --- balancers that draw, or whose answers differ


class RandomState:
    """A stateful balancer that draws its weights, from numbers that differ by rank."""

    def __init__(self, plain: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.drawn = [0.0, 0.0]
        self.age = 2
        self.plain = plain

    def __call__(self, gram: Tensor) -> Tensor:
        self.drawn = torch.rand(2, generator=self.generator).tolist()
        self.age = 0
        return self.weights

    @property
    def needs_rows(self) -> bool:
        return self.age >= 2

    @property
    def weights(self) -> Tensor:
        return torch.tensor(self.drawn, dtype=torch.float64)

    def step(self) -> None:
        self.age += 1

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"drawn": self.drawn, "age": self.age}
        return state if self.plain else state | {"tensor": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.age = state["drawn"], state["age"]


def random_weights() -> list[list[float]]:
    told = []
    for balancer in (RandomWeighting(), RandomState()):
        torch.manual_seed(dist.get_rank())
        model = make_model()
        optimizer = optimizer_of(model, balancer, ranks="average")
        for step in range(4):
            optimizer.backward(losses_of(model, step))
            told.append(optimizer.balance().weights.tolist())
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(flat(model))
    model = make_model()
    optimizer = optimizer_of(model, RandomState(plain=False), ranks="average")
    optimizer.backward(losses_of(model))
    with pytest.raises(RanksError, match=r"RandomState gave different weights .* no plain data"):
        optimizer.balance()
    return told


def test_random_balancers_draw_for_all_ranks(on_ranks: Any) -> None:
    first, second = on_ranks(2, random_weights)
    assert first == second
    assert len({tuple(weights) for weights in first}) == 4 + 2


# --- parameters that only some ranks reach


class Branches(nn.Module):
    """Rank 0 never takes the second branch, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.heads[0](self.branches[0](x))
        return y if dist.get_rank() == 0 else y + self.heads[1](self.branches[1](x))  # type: ignore[no-any-return]


def unequal_branches() -> None:
    for balancer in (MGDA(), Fixed([1.0, 1.0])):
        model = Branches()
        groups = [{"params": model.branches.parameters()}, {"params": model.heads.parameters(), "balanced": False}]
        inner = torch.optim.SGD(groups, lr=0.1, weight_decay=0.1)
        optimizer = BalancedOptimizer(inner, balancer, ranks="average")
        unused = [p.detach().clone() for p in (*model.branches[2].parameters(), *model.heads[2].parameters())]
        for step in range(3):
            optimizer.backward(losses_of(model, step))
            optimizer.balance()
            for part, reached in ((0, True), (1, True), (2, False)):
                for parameter in (*model.branches[part].parameters(), *model.heads[part].parameters()):
                    assert (parameter.grad is not None) == reached
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(flat(model))
        # Nobody reached it, so that weight decay leaves it alone.
        for before, after in zip(unused, (*model.branches[2].parameters(), *model.heads[2].parameters()), strict=True):
            assert torch.equal(before, after)


def test_parameters_that_only_one_rank_reaches_move_on_all(on_ranks: Any) -> None:
    on_ranks(2, unequal_branches)


def found_unused() -> None:
    """DistributedDataParallel with a parameter that nobody reaches, in cycles of both kinds."""
    model = Branches()
    model.branches[1].requires_grad_(False)
    model.heads[1].requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_of(model, MARBLE(interval=2), ranks="ddp")
    for step in range(4):
        optimizer.backward(losses_of(wrapped, step))
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks(flat(model))


def test_unused_parameters_under_ddp(on_ranks: Any) -> None:
    on_ranks(2, found_unused)


class Twice(nn.Module):
    """A checkpointed block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def used_twice() -> list[float]:
    found = []
    for mode in ("average", "ddp"):
        model = Twice()
        wrapped = DistributedDataParallel(model) if mode == "ddp" else model
        optimizer = optimizer_of(model, MARBLE(interval=2), ranks=mode)
        for step in range(4):
            optimizer.backward(losses_of(wrapped, step))
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(flat(model))
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1])
    return found[0].tolist()  # type: ignore[no-any-return]


def test_a_checkpointed_block_used_twice_under_ddp(on_ranks: Any) -> None:
    first, second = on_ranks(2, used_twice)
    assert first == second


# --- what else sees the rows


def metered() -> list[float]:
    model = make_model()
    meter = ConflictMeter()
    seen = []

    def on_rows(blocks: Any, names: Any) -> None:
        seen.append(gramian(list(blocks)))
        meter.update(blocks, names)

    optimizer = optimizer_of(model, MGDA(), ranks="average", on_rows=on_rows)
    for step in range(3):
        optimizer.backward(losses_of(model, step))
        info = optimizer.balance()
        torch.testing.assert_close(seen[-1], info.gram, rtol=1e-6, atol=1e-9)
        optimizer.step()
        optimizer.zero_grad()
    return meter.cosines().flatten().tolist()  # type: ignore[no-any-return]


def test_hooks_on_rows_see_the_whole_averaged_rows(on_ranks: Any) -> None:
    first, second = on_ranks(2, metered)
    assert first == second


def hook_that_raises() -> None:
    def hook(blocks: Any, names: Any) -> None:
        raise ValueError("once")

    model = make_model()
    optimizer = optimizer_of(model, MGDA(), ranks="average", on_rows=hook)
    optimizer.backward(losses_of(model))
    with pytest.raises(ValueError, match="once"):
        optimizer.balance()
    with pytest.raises(StateError, match="failed in this cycle"):
        optimizer.balance()


def test_a_cycle_that_failed_is_not_averaged_twice(on_ranks: Any) -> None:
    on_ranks(2, hook_that_raises)


# --- what averaging after the solve would give


def steep_on_each_side() -> tuple[list[float], list[float], list[float]]:
    weight = nn.Parameter(torch.ones(2))
    steep = torch.tensor([[1.0, 5.0], [5.0, 1.0]])[dist.get_rank()]
    info = backward(list(weight * steep), [weight], MGDA(), ranks="average")
    assert weight.grad is not None
    gradient = weight.grad.tolist()
    alone = backward(list(weight * steep), [weight], MGDA(), ranks="alone")
    return info.weights.tolist(), gradient, alone.weights.tolist()


def test_rows_are_averaged_before_the_solve(on_ranks: Any) -> None:
    first, second = on_ranks(2, steep_on_each_side)
    assert first[0] == second[0] == pytest.approx([0.5, 0.5])
    assert first[1] == second[1] == pytest.approx([1.5, 1.5])
    assert first[2] == pytest.approx([25 / 26, 1 / 26])
    assert second[2] == pytest.approx([1 / 26, 25 / 26])
