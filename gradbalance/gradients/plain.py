"""Gradients outside the balancing: task heads, extra losses, and the one backward pass of steps without rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradbalance.gradients.graph import Graph
from gradbalance.gradients.losses import Objectives
from gradbalance.gradients.passes import explained, gradients
from gradbalance.gradients.record import resumed
from gradbalance.gradients.rows import accumulate

Pairs = list[tuple[Tensor, Tensor | None]]


def plain_gradients(
    objectives: Objectives, balanced: Sequence[Tensor], graph: Graph, extra_loss: Tensor | None
) -> Pairs:
    """What is added outside the balancing on a step with rows: the graph is kept and nothing is written yet.

    Args:
        objectives: The losses; their sum, unweighted, gives leaves outside ``balanced`` their gradient. That pass stops
            where no such leaf lies further back: it does not run through the balanced trunk.
        balanced: The balanced parameters.
        graph: Of the losses and of ``extra_loss``.
        extra_loss: A scalar, gives every leaf it reaches its gradient.

    Returns:
        Leaves and their gradients (None: not reached).
    """
    pairs: Pairs = []
    heads = graph.outside(balanced)
    with resumed(graph.recordings):
        if heads:
            total = objectives.total()
            pairs += zip(heads, gradients(total, heads, "the sum of losses", retain_graph=True), strict=True)
        if extra_loss is not None:
            leaves = [*graph.leaves.values(), *graph.extra_leaves.values()]
            pairs += zip(leaves, gradients(extra_loss, leaves, "extra_loss", retain_graph=True), strict=True)
    return pairs


def add_all(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Add gradients to ``.grad``; leaves with None keep theirs."""
    for leaf, gradient in pairs:
        if gradient is not None:
            accumulate(leaf, gradient)


def backward_scalarized(
    objectives: Objectives, weights: Tensor, balanced: Sequence[Tensor], graph: Graph, extra_loss: Tensor | None
) -> None:
    """The step without rows: ``.grad`` of ``balanced`` grows by the gradient of the weighted losses and the extra loss.

    One ordinary backward pass. Where the losses reach leaves outside ``balanced``, a second one that stops short of the
    trunk gives those the gradient of ``sum_k loss_k + extra_loss``.
    """
    weighted = _plus(objectives.scalarize(weights), extra_loss)
    heads = graph.outside(balanced)
    graph.require_any(balanced)
    with resumed(graph.recordings), explained("the losses"):
        if not heads:
            weighted.backward()  # type: ignore[no-untyped-call]
            return
        total = _plus(objectives.total(), extra_loss)
        torch.autograd.backward(total, inputs=heads, retain_graph=True)
        torch.autograd.backward(weighted, inputs=balanced)


def _plus(loss: Tensor, extra_loss: Tensor | None) -> Tensor:
    return loss if extra_loss is None else loss + extra_loss.reshape(()).to(loss.device)
