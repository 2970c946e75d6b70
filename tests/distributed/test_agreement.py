"""Ranks that are not set up alike, or fall out of step, are told so on all ranks, with the reason; nobody hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradbalance import (
    MARBLE,
    MGDA,
    BalancedOptimizer,
    Fixed,
    GradBalanceError,
    InvalidArgumentError,
    Mean,
    NonFiniteError,
    RanksError,
    backward,
)
from gradbalance.distributed import Ranks
from gradbalance.distributed.collectives import gather


def make_model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses_of(model: nn.Module, names: str = "ab") -> dict[str, Tensor]:
    y = model(torch.full((2, 3), 1.0 + dist.get_rank()))
    return {name: (y[:, "ab".index(name)] - 1).square().mean() for name in names}


def optimizer_of(model: nn.Module, balancer: Any = None, ranks: Any = "average", **options: Any) -> BalancedOptimizer:
    return BalancedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), balancer or MARBLE(interval=2), ranks=ranks, **options
    )


def other_objectives() -> None:
    optimizer_of(model := make_model()).backward(losses_of(model, "ab" if dist.get_rank() == 0 else "b"))


def other_shapes() -> None:
    model = nn.Sequential(nn.Linear(3, 3 + dist.get_rank()), nn.Linear(3 + dist.get_rank(), 2))
    optimizer_of(model).backward(losses_of(model))


def other_values() -> None:
    optimizer_of(model := make_model(dist.get_rank())).backward(losses_of(model))


def other_frozen() -> None:
    model = make_model()
    model[0].requires_grad_(dist.get_rank() == 0)
    optimizer_of(model).backward(losses_of(model))


def other_mode() -> None:
    optimizer_of(model := make_model(), ranks=["average", "ddp"][dist.get_rank()]).backward(losses_of(model))


def other_balancer() -> None:
    optimizer_of(model := make_model(), [MGDA(), Mean()][dist.get_rank()]).backward(losses_of(model))


def other_arguments_of_the_balancer() -> None:
    optimizer_of(model := make_model(), MARBLE(interval=2 + dist.get_rank())).backward(losses_of(model))


def hook_on_one_rank() -> None:
    hook = [lambda rows, names: None, None][dist.get_rank()]
    optimizer_of(model := make_model(), on_rows=hook).backward(losses_of(model))


def other_learning_rate() -> None:
    optimizer = optimizer_of(model := make_model())
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    optimizer.backward(losses_of(model))


def one_loaded() -> None:
    model = make_model()
    optimizer = optimizer_of(model)
    if dist.get_rank() == 0:
        optimizer.balancer(torch.eye(2))
    optimizer.backward(losses_of(model))


def nothing_said() -> None:
    optimizer_of(model := make_model(), ranks=None).backward(losses_of(model))


def nothing_said_without_rows() -> None:
    optimizer_of(model := make_model(), Mean(), ranks=None).backward(losses_of(model))


def step(optimizer: BalancedOptimizer, losses: dict[str, Tensor]) -> None:
    optimizer.backward(losses)
    optimizer.step()
    optimizer.zero_grad()


def said_ddp_and_not_wrapped() -> None:
    model = make_model()
    optimizer = optimizer_of(model, ranks="ddp")
    step(optimizer, losses_of(model))
    step(optimizer, losses_of(model))


def said_ddp_and_went_around_it() -> None:
    model = make_model()
    DistributedDataParallel(model)
    step(optimizer_of(model, Mean(), ranks="ddp"), losses_of(model))


def last_backward_without_sync() -> None:
    wrapped = DistributedDataParallel(make_model())
    with wrapped.no_sync():
        step(optimizer_of(wrapped, Mean(), ranks="ddp"), losses_of(wrapped))


def no_sync_around_the_backward_alone() -> None:
    """Works, and saves nothing: the forward decides."""
    wrapped = DistributedDataParallel(make_model())
    optimizer = optimizer_of(wrapped, Mean(), ranks="ddp")
    losses = losses_of(wrapped)
    with wrapped.no_sync():
        step(optimizer, losses)
    raise RanksError("fine")


def static_graph() -> None:
    wrapped = DistributedDataParallel(make_model(), static_graph=True)
    optimizer = optimizer_of(wrapped, ranks="ddp")
    step(optimizer, losses_of(wrapped))
    step(optimizer, losses_of(wrapped))


def wrapped_and_said_average() -> None:
    wrapped = DistributedDataParallel(make_model())
    step(optimizer_of(wrapped, Mean()), losses_of(wrapped))


def one_rank_refreshes() -> None:
    model = make_model()
    optimizer = optimizer_of(model)
    step(optimizer, losses_of(model))
    if dist.get_rank() == 0:
        optimizer.balancer.step()
    step(optimizer, losses_of(model))


def stray_leaf_on_one_rank() -> None:
    model = make_model()
    stray = nn.Parameter(torch.ones(()))
    losses = losses_of(model)
    if dist.get_rank() == 1:
        losses["a"] = losses["a"] * stray
    step(optimizer_of(model), losses)


def nan_on_one_rank() -> None:
    model = make_model()
    losses = losses_of(model)
    if dist.get_rank() == 1:
        losses["b"] = losses["b"] * float("nan")
    step(optimizer_of(model), losses)


def nan_on_one_rank_without_rows() -> None:
    model = make_model()
    losses = losses_of(model)
    if dist.get_rank() == 0:
        losses["a"] = losses["a"] * float("inf")
    step(optimizer_of(model, Mean()), losses)


def function_with_other_objectives() -> None:
    model = make_model()
    backward(losses_of(model, ["ab", "a"][dist.get_rank()]), model.parameters(), MGDA(), ranks="average")


def no_dtensors() -> None:
    optimizer_of(model := make_model(), ranks="fsdp").backward(losses_of(model))


FAILURES: dict[Callable[[], None], tuple[type[GradBalanceError], str]] = {
    other_objectives: (RanksError, r'agree on objectives, found \["a", "b"\] on rank 0; \["b"\] on rank 1: hand over'),
    other_shapes: (RanksError, "agree on parameters, found .*4 with 20 numbers.* on rank 0"),
    other_values: (RanksError, "agree on values of the parameters.*start all ranks from one seed"),
    other_frozen: (RanksError, "agree on parameters"),
    other_mode: (RanksError, 'agree on ranks, found "average" on rank 0; "ddp" on rank 1'),
    other_balancer: (RanksError, 'agree on balancers, found "MGDA" on rank 0; "Mean" on rank 1'),
    other_arguments_of_the_balancer: (RanksError, r"agree on arguments of the balancers.*interval=2.* on rank 0"),
    hook_on_one_rank: (RanksError, r'agree on options .*"on_rows": true.* on rank 0.*do nothing on some'),
    other_learning_rate: (RanksError, "agree on settings of the optimizer.*lr.*the same learning rates"),
    one_loaded: (RanksError, r"agree on rows are due.*load the same checkpoint"),
    nothing_said: (RanksError, "ranks must be given.*found 2 ranks and none given.*ranks='ddp'"),
    nothing_said_without_rows: (RanksError, "ranks must be given"),
    said_ddp_and_not_wrapped: (RanksError, "has averaged, found different ones.*ranks='average' without a wrapper"),
    said_ddp_and_went_around_it: (RanksError, r"through the wrapped model \(not .module\)"),
    last_backward_without_sync: (RanksError, r"out of no_sync\(\)"),
    no_sync_around_the_backward_alone: (RanksError, "fine"),
    static_graph: (RanksError, "do not set static_graph=True"),
    wrapped_and_said_average: (RanksError, "averaged them already.*ranks='ddp'"),
    one_rank_refreshes: (RanksError, "out of step.*whether rows are due"),
    stray_leaf_on_one_rank: (RanksError, "out of step.*outside the optimizer"),
    nan_on_one_rank: (NonFiniteError, r"on every rank, found NaN or Inf for \['b'\] on one of 2"),
    nan_on_one_rank_without_rows: (NonFiniteError, r"\['a'\] on one of 2"),
    function_with_other_objectives: (RanksError, "agree on objectives"),
    no_dtensors: (RanksError, "ranks='fsdp' takes parameters sharded by fully_shard, found 4 of 4 that are not"),
}


@contextlib.contextmanager
def told(into: list[tuple[str, str]]) -> Iterator[None]:
    try:
        yield
    except GradBalanceError as error:
        into.append((type(error).__name__, str(error)))
    else:
        into.append(("nothing", ""))


def all_failures() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for function in FAILURES:
        with told(found):
            function()
    return found


def test_every_rank_is_told_what_is_wrong(on_ranks: Any) -> None:
    first, second = on_ranks(2, all_failures)
    assert first == second
    for (kind, message), (function, (error, pattern)) in zip(first, FAILURES.items(), strict=True):
        assert kind == error.__name__, f"{function.__name__}: {kind} {message}"
        assert pytest.raises(error, match=pattern).matches(error(message)), f"{function.__name__}: {message}"


def other_order() -> list[float]:
    """Objectives in another order are aligned with rank 0, in the optimizer and in the function."""
    model = make_model()
    losses = losses_of(model)
    if dist.get_rank() == 1:
        losses = dict(reversed(losses.items()))
    optimizer = optimizer_of(model, Fixed([1.0, 2.0]))
    optimizer.backward(losses)
    info = optimizer.balance()
    assert info.names == ("a", "b")
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(gather(flat, None)[0], gather(flat, None)[1])
    model.zero_grad()
    losses = losses_of(model)
    if dist.get_rank() == 1:
        losses = dict(reversed(losses.items()))
    assert backward(losses, model.parameters(), Fixed([1.0, 2.0]), ranks="average").names == ("a", "b")
    again = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(flat, again)
    return [value.item() for value in losses_of(model).values()] + list(info.losses.values())


def test_objectives_in_another_order_are_aligned(on_ranks: Any) -> None:
    first, second = on_ranks(2, other_order)
    assert first[2:] == second[2:] == pytest.approx([(a + b) / 2 for a, b in zip(first[:2], second[:2], strict=True)])


def test_one_process_needs_no_word_and_any_word_does_nothing() -> None:
    reference = None
    for ranks in (None, "average", "ddp", "alone", Ranks("average")):
        model = make_model()
        y = model(torch.ones(2, 3))
        backward({"a": y[:, 0].sum(), "b": y[:, 1].sum()}, model.parameters(), MGDA(), ranks=ranks)
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        reference = flat if reference is None else reference
        assert torch.equal(flat, reference)


def test_words_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="ranks must be one of"):
        optimizer_of(make_model(), ranks="horovod")
    with pytest.raises(InvalidArgumentError, match=r"ranks must be gradbalance.distributed.Ranks.*found int"):
        optimizer_of(make_model(), ranks=2)
    with pytest.raises(InvalidArgumentError, match="reduction must be one of"):
        Ranks("average", reduction="ring")  # type: ignore[arg-type]


class DeepSpeedEngine(nn.Module):
    """Named as DeepSpeed's."""


def test_engines_that_hide_gradients_are_refused() -> None:
    model = make_model()
    with pytest.raises(InvalidArgumentError, match=r"must not be a DeepSpeedEngine: .* Use fully_shard"):
        optimizer_of(model, module=DeepSpeedEngine())
    with pytest.raises(InvalidArgumentError, match="FullyShardedDataParallel: FSDP1 flattens"):
        optimizer_of(model, module=type("FullyShardedDataParallel", (nn.Module,), {})())
    for mark, what in (("ds_id", "ZeRO-3"), ("_is_flat_param", "FSDP1")):
        weight = nn.Parameter(torch.ones(2))
        setattr(weight, mark, 1)
        with pytest.raises(RanksError, match=f"number 0 is .*{what}"):
            backward(list(weight), [weight], MGDA())
