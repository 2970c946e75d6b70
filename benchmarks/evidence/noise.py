"""How often does a batch's min-norm direction oppose an *expected* gradient, and what helps?

A direction agrees with every reward of its own batch by construction. What training wants is agreement with the
gradients that the batch estimates. Here per-group gradients of many prompt groups at one point of training are kept as
one Gramian, so that any batch, and the gradient expected from all groups outside it, is arithmetic on that matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import gradbalance as gb
from benchmarks.evidence.conflict import REWARDS
from benchmarks.evidence.groups import GroupGradients, Matrix
from benchmarks.evidence.statistics import interval
from benchmarks.evidence.store import Store
from benchmarks.report import Result, Table, figure

BATCH_SIZES = (6, 12, 24, 48, 96)
BATCHES = 200
SHRINKAGE = (0.25, 0.5)
FLOOR = 0.1
MEMORY = 0.7
SETS = {"rewards of the preset": ("groups", ()), "conflicting rewards": ("groups-conflicting", (REWARDS,))}


def weights_of(gram: Matrix) -> Matrix:
    """MARBLE's weights on the raw rows."""
    return gb.MARBLE(interval=1)(torch.tensor(gram)).numpy()


def of_batch(balancer: gb.Balancer) -> Callable[[GroupGradients, Sequence[int]], Matrix]:
    """Weights of a balancer on the raw rows of a batch; a refresh knows nothing of those before."""
    return lambda data, batch: balancer(torch.tensor(data.between(batch, batch))).numpy()


def inverse_norms(gram: Matrix) -> Matrix:
    """1 / |g_k|, and 0 for a row that is zero."""
    norms = np.sqrt(gram.diagonal())
    return np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)


def estimators() -> dict[str, Callable[[GroupGradients, Sequence[int]], Matrix]]:
    """From a batch to weights on its raw rows; some keep memory over the batches of a sequence."""
    memory: dict[str, Matrix] = {}

    def averaged(data: GroupGradients, batch: Sequence[int]) -> Matrix:
        gram = data.between(batch, batch)
        memory["gram"] = MEMORY * memory["gram"] + (1 - MEMORY) * gram if memory else gram
        return weights_of(memory["gram"])

    return {
        "min-norm of the batch": of_batch(gb.MARBLE(interval=1)),
        "equal coefficients": lambda data, batch: inverse_norms(data.between(batch, batch)),
        **{f"shrinkage = {s:g}": of_batch(gb.MARBLE(interval=1, shrinkage=s)) for s in SHRINKAGE},
        f"floor = {FLOOR:g}": of_batch(gb.MARBLE(interval=1, floor=FLOOR)),
        f"Gramian averaged over batches, {MEMORY:g}": averaged,
        "U-statistic Gramian": lambda data, batch: weights_of(data.unbiased(batch)),
    }


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Collect per-group gradients for each seed and set of rewards, then draw batches of every size."""
    from benchmarks.evidence.probe import group_gradients

    rows: list[dict[str, Any]] = []
    for title, (name, overrides) in SETS.items():
        for seed in range(seeds):
            data = group_gradients(store, name=name, overrides=overrides, seed=seed, quick=quick)
            for size in [size for size in BATCH_SIZES if size <= data.groups // 2]:
                judged = _judge(data, size, np.random.default_rng(seed))
                rows += [{"rewards": title, "seed": seed, "batch": size, **row} for row in judged]
    sizes = sorted({row["batch"] for row in rows})
    return Result(
        name="noise",
        settings={"seeds": seeds, "batches": BATCHES, "memory": MEMORY, "sets": SETS},
        rows=rows,
        tables=[_table(title, rows, sizes) for title in SETS],
        notes=[
            "Share of batches with a negative inner product with at least one reward's gradient as estimated from all "
            "groups outside the batch. Mean over seeds [95 % bootstrap interval over seeds]. Centered rows, untrained "
            "policy.",
        ],
        figures={"evidence-noise": _figure(rows, sizes)},
    )


def _table(title: str, rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Table:
    lines = []
    for method in estimators():
        cells = []
        for size in sizes:
            chosen = [row for row in rows if (row["rewards"], row["method"], row["batch"]) == (title, method, size)]
            share = interval([100 * row["opposed"] for row in chosen])
            cells.append(f"{share.mean:.0f} % [{share.low:.0f}, {share.high:.0f}]")
        lines.append([method, *cells])
    return Table(
        f"Batches whose direction opposes an expected gradient, {title}",
        ["prompt groups in a batch", *map(str, sizes)],
        lines,
    )


def _judge(data: GroupGradients, size: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    methods = estimators()
    opposed: dict[str, list[bool]] = {name: [] for name in methods}
    worst: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(BATCHES):
        batch = rng.choice(data.groups, size, replace=False)
        if (data.counts[batch].sum(0) == 0).any():  # a reward without a sample: nothing to compare
            continue
        others = np.setdiff1d(np.arange(data.groups), batch)
        own, cross, expected = data.between(batch, batch), data.between(batch, others), data.between(others, others)
        for name, method in methods.items():
            weights = method(data, batch)
            gains = weights @ cross
            cosines = gains / np.sqrt(weights @ own @ weights) / np.sqrt(expected.diagonal())
            opposed[name].append(bool((gains < 0).any()))
            worst[name].append(float(cosines.min()))
    return [
        {"method": name, "opposed": float(np.mean(opposed[name])), "worst": float(np.mean(worst[name]))}
        for name in methods
    ]


def _figure(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Figure:
    picture, axes = figure(2, len(SETS), height=2.6)
    labels = {"opposed": "share of batches\nthat oppose one", "worst": "worst cosine with an\nexpected gradient"}
    for axis, (title, key) in zip(axes.flatten(), product(SETS, labels), strict=True):
        for method in estimators():
            chosen = [row for row in rows if (row["rewards"], row["method"]) == (title, method)]
            means = [np.mean([row[key] for row in chosen if row["batch"] == size]) for size in sizes]
            axis.plot(sizes, means, marker="o", label=method)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, sizes)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("prompt groups in a batch")
        axis.set_ylabel(labels[key])
    handles, names = axes[0][0].get_legend_handles_labels()
    picture.legend(handles, names, fontsize=8, loc="outside lower center", ncols=3)
    return picture
