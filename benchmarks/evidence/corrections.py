"""Our corrections against the published variant, one at a time: what a cached step does to the direction solved for.

Everything is measured on the steps of MARBLE runs (preset tiny): the cached direction of a step is compared with the
full solve that this very step would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import gradbalance as gb
from benchmarks.evidence.directions import Step, Vector, replay
from benchmarks.evidence.statistics import interval
from benchmarks.evidence.store import Store
from benchmarks.report import Result, Table, figure

INTERVAL = 8
OVERRIDES = ("run.epochs=24",)
VARIANTS = {
    "ours": {"amortize": "direction", "seen": "centered", "used": "centered"},
    "coefficients cached (published)": {"amortize": "coefficients", "seen": "centered", "used": "centered"},
    "missing = advantage 0 (published)": {"amortize": "direction", "seen": "full", "used": "zero"},
    "exact masks, not centered": {"amortize": "direction", "seen": "full", "used": "full"},
    "all published": {"amortize": "coefficients", "seen": "full", "used": "zero"},
    "solved on the first micro-batch (published)": {"amortize": "direction", "seen": "first", "used": "centered"},
}


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Probe one run per seed and replay every variant on its steps."""
    from benchmarks.evidence.probe import probed_runs

    probes = probed_runs("corrections", OVERRIDES, store, seeds=seeds, workers=workers, quick=quick)
    rows: list[dict[str, Any]] = []
    for variant, settings in VARIANTS.items():
        for seed, probe in enumerate(probes):
            steps = [Step(record, probe["names"]) for record in probe["records"]]
            rows.append({"variant": variant, "seed": seed, **_measure(steps, **settings)})
    lines = []
    for variant in VARIANTS:
        chosen = [row for row in rows if row["variant"] == variant]
        lines.append(
            [variant, *(str(interval([row[key] for row in chosen])) for key in ("agreement", "worst", "spread"))]
        )
    return Result(
        name="corrections",
        settings={"seeds": seeds, "overrides": list(OVERRIDES), "interval": INTERVAL, "variants": VARIANTS},
        rows=rows,
        tables=[
            Table("Cached steps", ["", "cosine with the full solve", "worst reward cosine", "spread of alpha*"], lines)
        ],
        notes=[
            "Mean over seeds [95 % bootstrap interval over seeds], over the steps between refreshes. Cosine with the "
            "full solve of the same step, both without the part that all rewards share. Spread: standard deviation of "
            "alpha* over steps, averaged over rewards.",
        ],
        figures={"evidence-corrections": _figure(rows)},
    )


def _measure(steps: Sequence[Step], *, amortize: str, seen: str, used: str) -> dict[str, Any]:
    balancer = gb.MARBLE(interval=INTERVAL, amortize=amortize)
    age: dict[int, list[float]] = {}
    agreement, worst, since = [], [], 0
    for step, (direction, fresh) in zip(steps, replay(steps, seen, balancer), strict=True):
        since = 0 if fresh else since + 1
        if fresh:
            continue
        weights = direction[step.places(seen)]
        cached = _without_common(step, weights, used)
        full = step.balanced("centered", gb.MARBLE(interval=1))
        agreement.append(step.cosine(cached, full))
        worst.append(float(np.nanmin(step.cosines(cached, "centered"))))
        age.setdefault(since, []).append(agreement[-1])
    solves = [step.rows(seen) for step in steps]
    alphas = np.array([_alpha(gram) for gram in solves])
    return {
        "agreement": float(np.mean(agreement)),
        "worst": float(np.mean(worst)),
        "spread": float(alphas.std(axis=0).mean()),
        "by_age": {str(key): float(np.mean(values)) for key, values in sorted(age.items())},
    }


def _without_common(step: Step, weights: Vector, used: str) -> Vector:
    """The direction without the pull that all rewards share: what is left speaks of rewards."""
    if used == "zero":  # each of these rows holds the whole of it
        return step.combined("zero", weights) - weights.sum() * step.single("common")
    return step.combined("centered", weights)


def _alpha(gram: Any) -> Vector:
    balancer = gb.MARBLE(interval=1)
    balancer(gram)
    return np.asarray(balancer.coefficients)


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    picture, axes = figure(1, height=3.0)
    picture.set_size_inches(7, 3.0)
    for variant in VARIANTS:
        curves = [row["by_age"] for row in rows if row["variant"] == variant]
        ages = sorted({int(age) for curve in curves for age in curve})
        means = [np.mean([curve[str(age)] for curve in curves if str(age) in curve]) for age in ages]
        axes[0][0].plot(ages, means, marker="o", label=variant)
    axes[0][0].set_xlabel("steps since the refresh")
    axes[0][0].set_ylabel("cosine with the full solve")
    axes[0][0].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture
