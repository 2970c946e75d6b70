"""Gradients of sharded parameters (FSDP2), which exist only as the ``.grad`` that a whole backward pass leaves behind.

The leaves of the graph are copies that ``fully_shard`` gathers for the time of a layer's computation, so
``torch.autograd.grad`` does not reach the parameters, and a pass cannot be confined to some of them. An ordinary
backward pass reduces each gradient over ranks and leaves this rank's shard of the mean in ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradbalance.errors import CollectorError
from gradbalance.gradients.losses import Objectives, plus
from gradbalance.gradients.passes import explained
from gradbalance.gradients.rows import Rows


def require_passes(collector: str) -> str:
    """Why sharded parameters are collected by passes.

    Raises:
        CollectorError: Another collector was asked for.
    """
    reason = "the parameters are sharded (FSDP2)"
    if collector == "linear":
        raise CollectorError(
            f"collector 'linear' cannot collect these rows: {reason}, and what recorded layers see are "
            "gathered copies of them. Use collector='passes'."
        )
    return reason


def collect_sharded(objectives: Objectives, rows: Rows, extra_loss: Tensor | None) -> None:
    """Add each objective's gradient, averaged over ranks, to this rank's shard of its row, by K whole backward passes.

    Whatever else the losses reach gets the plain gradient of their sum, from the same passes, and ``extra_loss`` takes
    one pass more, through everything. All ranks have to call this together.

    Raises:
        CollectorError: No balanced parameter got a gradient; or the graph was freed before.
    """
    last = len(objectives) - 1
    for k, name in enumerate(objectives.names):
        with set_aside(rows.parameters), explained(f"objective {name!r}"):
            torch.autograd.backward(objectives.scalar(k), retain_graph=k < last or extra_loss is not None)
            rows.add(k, [parameter.grad for parameter in rows.parameters])
    if not rows.reached:
        raise _unreached(len(rows.parameters))
    if extra_loss is not None:
        with explained("extra_loss"):
            torch.autograd.backward(extra_loss)


def backward_sharded(
    objectives: Objectives,
    weightings: Sequence[tuple[Tensor, Sequence[Tensor]]],
    plain: Sequence[Tensor],
    extra_loss: Tensor | None,
) -> None:
    """The step without rows: one whole backward pass per distinct weighting, of which only its own parameters keep any.

    Args:
        objectives: The losses.
        weightings: Weights [K] and the balanced parameters that they are for.
        plain: Parameters with weights of one.
        extra_loss: A scalar, or None.

    Raises:
        CollectorError: No balanced parameter got a gradient; or the graph was freed before.
    """
    passes: dict[tuple[float, ...], list[Tensor]] = {}
    for weights, parameters in (*weightings, (torch.ones(len(objectives)), plain)):
        if parameters:
            passes.setdefault(tuple(weights.tolist()), []).extend(parameters)
    for done, numbers in enumerate(passes, start=1):
        loss = plus(objectives.scalarize(torch.tensor(numbers, dtype=torch.float64)), extra_loss)
        others = [parameter for own, members in passes.items() if own != numbers for parameter in members]
        with set_aside(others), explained("the losses"):
            torch.autograd.backward(loss, retain_graph=done < len(passes))
    balanced = [parameter for _, parameters in weightings for parameter in parameters]
    if all(parameter.grad is None for parameter in balanced):
        raise _unreached(len(balanced))


@contextmanager
def set_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """``.grad`` is None at first inside, and afterwards what it was before."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _unreached(count: int) -> CollectorError:
    return CollectorError(
        f"none of the {count} balanced sharded parameters got a gradient: check that the losses depend on them, that "
        "the forward ran through the module given to fully_shard, and that set_requires_gradient_sync(False) is not in "
        "force."
    )
