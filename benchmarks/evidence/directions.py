"""Directions as weights on the vectors of a probed step, and their cosines, from that step's Gramian alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import gradbalance as gb

Vector = NDArray[np.float64]


class Step:
    """One probed optimizer step: R labelled vectors and their Gramian.

    Args:
        record: ``{"labels": R names, "gram": [R, R], ...}`` of :func:`benchmarks.evidence.probe.probed_runs`.
        names: The K rewards.

    >>> step = Step({"labels": ["full:a", "full:b", "common"], "gram": np.diag([1.0, 4.0, 1.0])}, ["a", "b"])
    >>> step.cosines(step.mean("full"), "full").round(3).tolist()
    [0.447, 0.894]
    """

    def __init__(self, record: Mapping[str, Any], names: Sequence[str]) -> None:
        self.labels: list[str] = list(record["labels"])
        self.gram = np.asarray(record["gram"], dtype=np.float64)
        self.names = tuple(names)

    def places(self, kind: str) -> list[int]:
        """Places of ``kind:name`` for all rewards."""
        return [self.labels.index(f"{kind}:{name}") for name in self.names]

    def rows(self, kind: str) -> torch.Tensor:
        """The K x K Gramian of ``kind:name``."""
        places = self.places(kind)
        return torch.tensor(self.gram[np.ix_(places, places)])

    def single(self, label: str) -> Vector:
        """One of the vectors itself."""
        return np.eye(len(self.labels))[self.labels.index(label)]

    def combined(self, kind: str, weights: Sequence[float] | torch.Tensor) -> Vector:
        """``sum_k weights_k * (kind:name_k)``."""
        direction = np.zeros(len(self.labels))
        direction[self.places(kind)] = np.asarray(weights, dtype=np.float64)
        return direction

    def mean(self, kind: str) -> Vector:
        """All rewards alike."""
        return self.combined(kind, np.full(len(self.names), 1 / len(self.names)))

    def balanced(self, kind: str, balancer: Callable[[torch.Tensor], torch.Tensor]) -> Vector:
        """What a balancer that sees ``kind:*`` makes of them."""
        return self.combined(kind, balancer(self.rows(kind)))

    def cosine(self, a: Vector, b: Vector) -> float:
        """Cosine between two directions; 0 if one is zero, which helps nobody."""
        lengths = (a @ self.gram @ a) * (b @ self.gram @ b)
        return float(a @ self.gram @ b / np.sqrt(lengths)) if lengths > 0 else 0.0

    def cosines(self, direction: Vector, kind: str) -> Vector:
        """Cosines of a direction with ``kind:*``; NaN for a reward whose own gradient is zero in this step."""
        basis = np.eye(len(self.labels))
        return np.array(
            [
                self.cosine(direction, basis[place]) if self.gram[place, place] > 0 else np.nan
                for place in self.places(kind)
            ]
        )


def replay(steps: Sequence[Step], kind: str, balancer: gb.Balancer) -> list[tuple[Vector, bool]]:
    """The directions of a stateful balancer that lives through the steps, each with whether it was solved afresh.

    The trajectory stays that of the run that was probed; only the balancer is another one.
    """
    directions = []
    for step in steps:
        fresh = bool(getattr(balancer, "needs_rows", True))
        weights = balancer(step.rows(kind)) if fresh else balancer.weights
        directions.append((step.combined(kind, weights), fresh))
        if hasattr(balancer, "step"):
            balancer.step()
    return directions
