"""Does a direction agree with every reward's own gradient? The measure of the paper's Table S1, on the tiny SD3.

All methods are judged on the same batches: those of MARBLE runs. "Synchronized" steps are the first after the
old policy was set to the trained one; later steps of an epoch also carry the pull back to the old policy, which all
rewards share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import gradbalance as gb
from benchmarks.evidence.directions import Step, Vector, replay
from benchmarks.evidence.statistics import interval
from benchmarks.evidence.store import Store
from benchmarks.report import Result, Table, figure

# Four steps an epoch from an old policy that is the trained one at the start of each epoch.
OVERRIDES = ("optimizer.steps_per_epoch=4", "old_policy.mode=on_policy", "run.epochs=12", "optimizer.lr=1e-3")
INTERVAL = 8

# From a step to a direction, without memory. Centered: only what rewards say is balanced, the shared part is added.
METHODS: dict[str, Callable[[Step], Vector]] = {
    "weighted sum": lambda step: step.single("sum"),
    "mean": lambda step: step.mean("full"),
    "MGDA, raw": lambda step: step.balanced("full", gb.MGDA()),
    "MARBLE, full": lambda step: step.balanced("full", gb.MARBLE(interval=1)),
    "MARBLE, full, centered": lambda step: step.balanced("centered", gb.MARBLE(interval=1)) + step.single("common"),
}
CACHED = "MARBLE, N = 8"


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Probe one run per seed and judge all methods on its steps."""
    from benchmarks.evidence.probe import probed_runs

    probes = probed_runs("harmony", OVERRIDES, store, seeds=seeds, workers=workers, quick=quick)
    measured: dict[tuple[str, str, str], list[list[float]]] = {}
    for probe in probes:
        names = probe["names"]
        steps = [Step(record, names) for record in probe["records"]]
        first = [record["position"] == 0 for record in probe["records"]]
        directions = {name: [method(step) for step in steps] for name, method in METHODS.items()}
        directions[CACHED] = [direction for direction, _ in replay(steps, "full", gb.MARBLE(interval=INTERVAL))]
        for method, chosen in directions.items():
            for against in ("full", "centered"):
                for when, wanted in (("synchronized", True), ("later", False)):
                    cosines = [
                        step.cosines(direction, against)
                        for step, direction, is_first in zip(steps, chosen, first, strict=True)
                        if is_first == wanted
                    ]
                    measured.setdefault((method, against, when), []).append(summary(cosines))
    rows = [
        {"method": method, "against": against, "when": when, "per_seed": values}
        for (method, against, when), values in measured.items()
    ]
    return Result(
        name="harmony",
        settings={"seeds": seeds, "overrides": list(OVERRIDES)},
        rows=rows,
        tables=[
            _table(measured, against, when) for against in ("full", "centered") for when in ("synchronized", "later")
        ],
        notes=[
            "Mean over seeds [95 % bootstrap interval over seeds]. Cosines between the step's direction and each "
            "reward's own gradient on the same batch; conflict: share of steps with a negative one.",
        ],
        figures={"evidence-harmony": _figure(rows)},
    )


def summary(cosines: Sequence[Vector]) -> list[float]:
    """Worst, mean and variance of a step's cosines, each averaged over steps, and the share of steps with a conflict.

    >>> summary([np.array([0.5, -0.1]), np.array([0.5, 0.5])])
    [0.2, 0.35, 0.045, 0.5]
    """
    worst = [float(np.nanmin(c)) for c in cosines]
    mean, variance = (float(np.mean([f(c) for c in cosines])) for f in (np.nanmean, np.nanvar))
    return [round(float(np.mean(worst)), 12), round(mean, 12), round(variance, 12), float(np.mean(np.array(worst) < 0))]


def _table(measured: dict[tuple[str, str, str], list[list[float]]], against: str, when: str) -> Table:
    own = "full gradient r L+ + (1 - r) L-" if against == "full" else "centered gradient (r - 1/2)(L+ - L-)"
    lines = []
    for (method, kind, time), values in measured.items():
        if (kind, time) == (against, when):
            lines.append([method, *(str(interval([seed[j] for seed in values])) for j in range(4))])
    columns = ["", "worst cosine", "mean cosine", "variance", "conflict"]
    return Table(f"Against each reward's {own}, {when} steps", columns, lines)


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    picture, axes = figure(2, height=2.8)
    for axis, when in zip(axes[0], ("synchronized", "later"), strict=True):
        chosen = [row for row in rows if row["against"] == "centered" and row["when"] == when]
        for place, row in enumerate(chosen):
            worst = interval([seed[0] for seed in row["per_seed"]])
            axis.errorbar(
                worst.mean, place, xerr=[[worst.mean - worst.low], [worst.high - worst.mean]], fmt="o", capsize=3,
                color="#0b6e99" if "MARBLE" in row["method"] else "#8d99ae",
            )  # fmt: skip
        axis.axvline(0, color="0.6", linewidth=1, zorder=0)
        axis.set_yticks(range(len(chosen)), [row["method"] for row in chosen] if axis is axes[0][0] else [])
        axis.set_ylim(len(chosen) - 0.5, -0.5)
        axis.set_title(f"{when} steps", fontsize=9, loc="left")
        axis.set_xlabel("worst cosine with a\nreward's centered gradient")
    return picture
