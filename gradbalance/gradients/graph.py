"""What one linear walk over the autograd graph tells: which leaves the losses reach, and through what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from gradbalance.errors import CollectorError
from gradbalance.gradients.record import RecordedLinear, Recording


@dataclass(frozen=True, eq=False)
class Graph:
    """Facts about the graph behind the losses of one micro-batch.

    Attributes:
        leaves: By id, every leaf that requires grad and that the losses reach.
        extra_leaves: By id, those that only the extra loss reaches.
        unrecorded: ids of leaves that the losses reach by any edge that does not come from a recorded layer.
        recordings: The recordings whose layers take part.
    """

    leaves: dict[int, Tensor] = field(default_factory=dict)
    extra_leaves: dict[int, Tensor] = field(default_factory=dict)
    unrecorded: set[int] = field(default_factory=set)
    recordings: set[Recording] = field(default_factory=set)

    @property
    def unchecked(self) -> bool:
        """Does a recording take part whose rows were never compared with the reference?"""
        return any(not recording.checked for recording in self.recordings)

    def require_any(self, parameters: Sequence[Tensor]) -> None:
        """Raise where the losses reach none of ``parameters``: a step that trains nothing is a mistake.

        Raises:
            CollectorError: None is reached.
        """
        if not any(id(parameter) in self.leaves for parameter in parameters):
            raise CollectorError(
                f"none of the {len(parameters)} balanced parameters is reached by any loss: check that the losses "
                "depend on them, and that adapters were not switched between forward and backward."
            )

    def outside(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Reached leaves that are not among ``parameters``: task heads and other plain parameters."""
        inside = {id(parameter) for parameter in parameters}
        return [leaf for key, leaf in (self.leaves | self.extra_leaves).items() if key not in inside]


def explore(roots: Iterable[Tensor], extra_loss: Tensor | None = None) -> Graph:
    """Walk the graph once, each node once: linear in its size however often paths rejoin.

    Args:
        roots: The losses, or tensors whose graphs make up theirs.
        extra_loss: What is added outside the balancing.

    Raises:
        CollectorError: The graph contains a segment of reentrant checkpointing. Its inner parameters are invisible to
            ``torch.autograd.grad`` and would get zero rows without a word.
    """
    graph = Graph()
    seen: set[Node] = set()
    for root in roots:
        _walk(root, graph, seen, graph.leaves, graph.unrecorded)
    if extra_loss is not None:
        reached: dict[int, Tensor] = {}
        _walk(extra_loss, graph, seen, reached, set())
        graph.extra_leaves.update((key, leaf) for key, leaf in reached.items() if key not in graph.leaves)
    return graph


def _walk(root: Tensor, graph: Graph, seen: set[Node], leaves: dict[int, Tensor], unrecorded: set[int]) -> None:
    if root.grad_fn is None:
        leaves[id(root)] = root
        unrecorded.add(id(root))
        return
    stack: list[Node] = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        # The node of a custom autograd.Function is its ctx, an instance of the Function's backward class.
        recorded = isinstance(node, RecordedLinear._backward_cls)
        if recorded:
            graph.recordings.add(node.recording)  # type: ignore[attr-defined]
        elif "CheckpointFunction" in node.name():
            raise CollectorError(
                "the forward used reentrant gradient checkpointing, which hides its parameters from per-objective "
                "gradients; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
        for child, _ in node.next_functions:
            if child is None:
                continue
            leaf = getattr(child, "variable", None)
            if leaf is None:
                stack.append(child)
                continue
            leaves[id(leaf)] = leaf
            if not recorded:
                unrecorded.add(id(leaf))
