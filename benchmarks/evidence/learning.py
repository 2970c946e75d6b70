"""All rewards over training at equal budget: MARBLE against the weighted sum, the mean, Nash-MTL and plain MGDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.evidence.statistics import Interval, interval
from benchmarks.evidence.store import Store
from benchmarks.evidence.training import TrainingRun, changes, place, train_all
from benchmarks.report import Result, Table, figure
from gradbalance_diffusers.report_data import read_run

METHODS = ("marble", "mean", "weighted-sum", "nash", "mgda-raw")
COLORS = dict(zip(METHODS, ("#0b6e99", "#3fa34d", "#d1495b", "#8a6fb0", "#edae49"), strict=True))


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train each method on each seed, evaluate every ten epochs."""
    runs = {
        method: [TrainingRun(method, seed, (f"balance.method={method}",)) for seed in range(seeds)]
        for method in METHODS
    }
    # Seed by seed, so that an interrupted experiment has whole seeds.
    train_all([runs[m][s] for s in range(seeds) for m in METHODS], store.folder, workers=workers, quick=quick)
    return compare("learning", runs, store, reference="marble", title="Change on held-out prompts")


def compare(
    name: str, runs: Mapping[str, Sequence[TrainingRun]], store: Store, *, reference: str, title: str
) -> Result:
    """Tables of the last evaluation, absolute and against ``reference`` seed by seed, and curves."""
    curves: dict[str, NDArray[np.float64]] = {}
    rewards: list[str] = []
    for variant, seeds in runs.items():
        rewards, curves[variant] = changes(seeds, store.folder)
    final = {variant: values[:, -1] for variant, values in curves.items()}
    rows: list[dict[str, Any]] = []
    absolute, paired = [], []
    for variant, values in final.items():
        intervals = [interval(values[:, k]) for k in range(len(rewards))]
        seconds = np.mean([read_run(place(run, store.folder)).seconds or 0.0 for run in runs[variant]])
        absolute.append([variant, *map(signed, intervals)])
        rows.append(
            {"variant": variant, "final": values.tolist(), "curves": curves[variant].tolist(), "seconds": seconds}
        )
        if variant != reference:
            differences = values - final[reference]
            paired.append([variant, *(signed(interval(differences[:, k])) for k in range(len(rewards)))])
    return Result(
        name=name,
        settings={"seeds": len(runs[reference]), "rewards": rewards},
        rows=rows,
        tables=[
            Table(title, ["", *rewards], absolute),
            Table(f"Difference to {reference}, seed by seed", ["", *rewards], paired),
        ],
        notes=["Mean over seeds [95 % bootstrap interval over seeds]. The same samples, steps and seeds for all."],
        figures={f"evidence-{name}": _figure(runs, curves, rewards, store)},
    )


def signed(value: Interval) -> str:
    """An interval of changes, for reading."""
    return f"{value.mean:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"


def _figure(
    runs: Mapping[str, Sequence[TrainingRun]],
    curves: Mapping[str, NDArray[np.float64]],
    rewards: Sequence[str],
    store: Store,
) -> Figure:
    picture, axes = figure(len(rewards), height=2.8)
    first = next(iter(runs.values()))[0]
    epochs = [row["epoch"] for row in read_run(place(first, store.folder)).evaluations if row["change"]]
    for k, (axis, reward) in enumerate(zip(axes[0], rewards, strict=True)):
        for place_, (variant, values) in enumerate(curves.items()):
            color = COLORS.get(variant, f"C{place_}")
            mean = values[:, :, k].mean(0)
            axis.plot([0, *epochs], [0.0, *mean], color=color, label=variant, marker="o")
            low, high = values[:, :, k].min(0), values[:, :, k].max(0)
            axis.fill_between([0, *epochs], [0.0, *low], [0.0, *high], color=color, alpha=0.10, linewidth=0)
        axis.axhline(0, color="0.6", linewidth=1, zorder=0)
        axis.set_title(reward, fontsize=9, loc="left")
        axis.set_xlabel("epoch")
    axes[0][0].set_ylabel("change on held-out prompts")
    axes[0][-1].legend(fontsize=7)
    return picture
