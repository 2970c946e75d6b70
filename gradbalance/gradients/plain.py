"""Gradients outside the balancing: task heads, extra losses, and the one backward pass of steps without rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradbalance.gradients.graph import Graph
from gradbalance.gradients.losses import Objectives, plus
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
    objectives: Objectives,
    weightings: Sequence[tuple[Tensor, Sequence[Tensor]]],
    graph: Graph,
    extra_loss: Tensor | None,
) -> None:
    """The step without rows: ``.grad`` grows by the gradient of the weighted losses and of the extra loss.

    One ordinary backward pass per distinct weighting, of ``sum_k weights_k loss_k + extra_loss``; where there are
    several, each stops where none of its own leaves lies further back.

    Args:
        objectives: The losses.
        weightings: Weights [K], float64 on the CPU, and the balanced parameters that they are for. Leaves in none of
            them (task heads) have weights of one.
        graph: Of the losses and of ``extra_loss``.
        extra_loss: A scalar, or None.
    """
    balanced = [parameter for _, parameters in weightings for parameter in parameters]
    graph.require_any(balanced)
    passes: dict[tuple[float, ...], list[Tensor]] = {}
    for weights, leaves in ((torch.ones(len(objectives)), graph.outside(balanced)), *weightings):
        reached = [leaf for leaf in leaves if id(leaf) in graph.leaves or id(leaf) in graph.extra_leaves]
        if reached:
            passes.setdefault(tuple(weights.tolist()), []).extend(reached)
    with resumed(graph.recordings), explained("the losses"):
        for done, (numbers, leaves) in enumerate(passes.items(), start=1):
            weights = torch.tensor(numbers, dtype=torch.float64)
            loss = plus(objectives.scalarize(weights), extra_loss)
            torch.autograd.backward(loss, inputs=leaves if len(passes) > 1 else None, retain_graph=done < len(passes))
