"""K backward passes: the slow, always right way to the rows, and the reference for every other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradbalance.errors import CollectorError
from gradbalance.gradients.losses import Objectives
from gradbalance.gradients.rows import Rows


def collect_by_passes(objectives: Objectives, rows: Rows, *, retain_graph: bool = False) -> None:
    """Add each objective's gradient to its row, by one ``torch.autograd.grad`` per objective.

    The graph is kept for all passes but the last, and for the last too if ``retain_graph``. Parameters that an
    objective does not reach count as zero in its row. Works with any differentiable loss, with non-reentrant gradient
    checkpointing (each pass recomputes the forward) and under autocast.

    Raises:
        CollectorError: Parts of the graph were freed before, or a compiled graph allows one pass only; names the
            objective.
    """
    last = len(objectives) - 1
    for k, name in enumerate(objectives.names):
        loss = objectives.scalar(k)
        rows.add(k, gradients(loss, rows.parameters, f"objective {name!r}", retain_graph=retain_graph or k < last))


def gradients(
    loss: Tensor, parameters: Sequence[Tensor], what: str, *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` with None for what is not reached, and with errors that say what to do.

    Args:
        loss: A differentiable scalar.
        parameters: Leaves.
        what: Named in errors.
        retain_graph: Keep the graph for a further pass.

    Raises:
        CollectorError: The graph was freed before, or its compiled part allows one pass only.
    """
    with explained(what):
        return torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what torch says about graphs that cannot be walked (again) into an error that says what to do.

    Args:
        what: Whose backward pass runs inside.

    Raises:
        CollectorError: The graph was freed before, or its compiled part allows one pass only.
    """
    try:
        yield
    except RuntimeError as error:
        if "second time" in str(error):
            raise CollectorError(
                f"the graph of {what} was freed before its backward pass: something called .backward() on a loss that "
                "shares its forward. Give that loss to extra_loss instead, or call its backward with retain_graph=True."
            ) from error
        if "donated buffer" in str(error):
            raise CollectorError(
                f"{what} runs through a torch.compile graph that allows a single backward pass; set "
                "torch._functorch.config.donated_buffer = False before compiling."
            ) from error
        raise
