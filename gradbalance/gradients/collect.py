"""From the losses of one micro-batch to rows, by the cheapest collector that is right for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from gradbalance.errors import CollectorError, InvalidArgumentError
from gradbalance.gradients.graph import Graph
from gradbalance.gradients.linear import check_row, collect_linear, parameter_name
from gradbalance.gradients.losses import Objectives
from gradbalance.gradients.passes import collect_by_passes
from gradbalance.gradients.record import resumed
from gradbalance.gradients.rows import Rows

Collector: TypeAlias = Literal["auto", "passes", "linear"]


class Choice(NamedTuple):
    """Which collector ran (``"passes"`` or ``"linear"``) and why."""

    collector: str
    reason: str


def collect(objectives: Objectives, rows: Rows, graph: Graph, *, collector: Collector, check: bool) -> Choice:
    """Add the gradients of the objectives to the rows. Their graph is freed, as by ``loss.backward()``.

    Args:
        objectives: K losses of one micro-batch.
        rows: To add to.
        graph: Of these losses.
        collector: ``"passes"``, ``"linear"``, or ``"auto"``: `linear` where it can and needs fewer passes.
        check: Compare one row of `linear` with a backward pass; ``rows`` must be fresh.

    Raises:
        CollectorError: ``"linear"`` cannot, no balanced parameter is reached, or the check found a difference.
    """
    graph.require_any(rows.parameters)
    choice = choose(objectives, rows.parameters, graph, collector)
    if choice.collector == "passes":
        # Recorded layers that were checkpointed must be recomputed as they were.
        with resumed(graph.recordings):
            collect_by_passes(objectives, rows)
    else:
        assert objectives.affine is not None
        # A micro-batch without samples has nothing to compare; a later cycle is checked.
        check = check and objectives.affine.terms.shape[1] > 0
        epsilon = collect_linear(objectives.affine, rows, graph, retain_graph=check)
        if check:
            check_row(objectives.affine, rows, graph, epsilon)
    return choice


def check_collector(collector: str) -> None:
    """Raise where ``collector`` is not one of the three.

    Raises:
        InvalidArgumentError: It is not.
    """
    if collector not in ("auto", "passes", "linear"):
        raise InvalidArgumentError(f"collector must be 'auto', 'passes' or 'linear', found {collector!r}.")


def choose(objectives: Objectives, parameters: Sequence[Tensor], graph: Graph, collector: Collector) -> Choice:
    """Which collector to use.

    Raises:
        CollectorError: ``"linear"`` was asked for and cannot collect these rows.
    """
    if collector == "passes":
        return Choice("passes", "asked for")
    obstacle = _obstacle_to_linear(objectives, parameters, graph)
    if collector == "linear":
        if obstacle:
            raise CollectorError(f"collector 'linear' cannot collect these rows: {obstacle}. Use collector='passes'.")
        return Choice("linear", "asked for")
    if obstacle:
        return Choice("passes", obstacle)
    assert objectives.affine is not None
    terms = objectives.affine.terms.shape[0]
    if len(objectives) <= terms:
        return Choice("passes", f"K = {len(objectives)} objectives take no more passes than M = {terms} terms")
    return Choice("linear", f"M = {terms} passes against K = {len(objectives)}")


def _obstacle_to_linear(objectives: Objectives, parameters: Sequence[Tensor], graph: Graph) -> str:
    if objectives.affine is None:
        return "the losses are not an AffineLoss"
    if not graph.recordings:
        return (
            "the forward was not recorded (use gradbalance.record, or BalancedOptimizer(..., module=model); compiled "
            "modules are not recorded)"
        )
    names = [parameter_name(p, graph, place) for place, p in enumerate(parameters) if id(p) in graph.unrecorded]
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"balanced parameters are used outside recorded linear layers: {shown}"
