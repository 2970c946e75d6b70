"""Final rewards of training variants over seeds, absolute and against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.evidence.statistics import Interval, interval
from benchmarks.evidence.store import Store
from benchmarks.evidence.training import TrainingRun, changes
from benchmarks.report import Table, figure

NOTE = "Mean over seeds [95 % bootstrap interval over seeds]. The same samples, steps and seeds for all."


@dataclass(frozen=True)
class Comparison:
    """Variants of a training run.

    Attributes:
        rewards: K names.
        curves: Variant -> paired change on the held-out prompts ``[seeds, evaluations after the first, K]``.
        reference: The variant that the others are compared with.
    """

    rewards: Sequence[str]
    curves: Mapping[str, NDArray[np.float64]]
    reference: str

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[TrainingRun]], store: Store, *, reference: str) -> Comparison:
        """Read finished runs, the same seeds for each variant."""
        curves, rewards = {}, []
        for variant, own in runs.items():
            rewards, curves[variant] = changes(own, store.folder)
        return cls(rewards, curves, reference)

    def final(self, variant: str) -> NDArray[np.float64]:
        """Changes at the last evaluation ``[seeds, K]``."""
        return self.curves[variant][:, -1]

    def difference(self, variant: str) -> NDArray[np.float64]:
        """The last evaluation minus that of the reference, seed by seed ``[seeds, K]``."""
        return self.final(variant) - self.final(self.reference)

    def tables(self, title: str) -> list[Table]:
        """Absolute changes, and differences to the reference; the mean over rewards last."""
        columns = ["", *self.rewards, "mean of rewards"]
        absolute = [[variant, *_cells(self.final(variant))] for variant in self.curves]
        paired = [[v, *_cells(self.difference(v))] for v in self.curves if v != self.reference]
        return [
            Table(title, columns, absolute),
            Table(f"Difference to {self.reference}, seed by seed", columns, paired),
        ]

    def rows(self) -> list[dict[str, Any]]:
        """All of it as plain values."""
        return [{"variant": v, "final": self.final(v).tolist(), "curves": c.tolist()} for v, c in self.curves.items()]

    def figure(self, label: str, *, relative: bool) -> Figure:
        """One panel per reward, one line per variant: mean and interval, and a dot per seed.

        Args:
            label: Of the horizontal axes.
            relative: Draw differences to the reference instead of changes.
        """
        variants = [variant for variant in self.curves if not relative or variant != self.reference]
        columns = 3
        lines = -(-len(self.rewards) // columns)
        picture, grid = figure(columns, lines, height=0.9 + 0.22 * len(variants))
        axes = grid.flatten()
        for k, (axis, reward) in enumerate(zip(axes, self.rewards, strict=False)):
            for line, variant in enumerate(variants):
                values = (self.difference(variant) if relative else self.final(variant))[:, k]
                mean = interval(values)
                axis.plot(values, [line] * len(values), ".", color="#8d99ae", markersize=4)
                axis.plot([mean.low, mean.high], [line, line], color="#0b6e99", linewidth=2)
                axis.plot(mean.mean, line, "o", color="#0b6e99", markersize=4)
            axis.axvline(0, color="0.6", linewidth=1, zorder=0)
            axis.set_yticks(range(len(variants)), variants if k % columns == 0 else [], fontsize=8)
            axis.set_ylim(len(variants) - 0.5, -0.5)
            axis.locator_params(axis="x", nbins=5)  # labels of small differences are long
            axis.set_title(reward, fontsize=9, loc="left")
        for axis in axes[len(self.rewards) :]:
            axis.set_axis_off()
        picture.supxlabel(label, fontsize=9)
        return picture


def _cells(values: NDArray[np.float64]) -> list[str]:
    every = np.concatenate([values, values.mean(axis=1, keepdims=True)], axis=1)
    return [signed(interval(column)) for column in every.T]


def signed(value: Interval) -> str:
    """An interval of changes, for reading.

    >>> signed(Interval(0.1, -0.02, 0.3))
    '+0.100 [-0.020, +0.300]'
    """
    return f"{value.mean:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"
