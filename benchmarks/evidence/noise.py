"""How often does a batch's min-norm direction oppose an *expected* gradient, and what helps?

A direction agrees with every reward of its own batch by construction. What training wants is agreement with the
gradients that the batch estimates. Here per-group gradients of many prompt groups at one point of training are kept as
one Gramian, so that any batch, and the gradient expected from all groups outside it, is arithmetic on that matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import gradbalance as gb
from benchmarks.evidence.groups import GroupGradients, Matrix
from benchmarks.evidence.statistics import interval
from benchmarks.evidence.store import Store
from benchmarks.report import Result, Table, figure

BATCH_SIZES = (6, 12, 24, 48, 96)
BATCHES = 200
SHRINKAGE = 0.5
MEMORY = 0.7


def weights_of(gram: Matrix) -> Matrix:
    """MARBLE's weights on the raw rows."""
    return gb.MARBLE(interval=1)(torch.tensor(gram)).numpy()


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

    def shrunk(data: GroupGradients, batch: Sequence[int]) -> Matrix:
        gram = data.between(batch, batch)
        balancer = gb.MARBLE(interval=1)
        balancer(torch.tensor(gram))
        alpha = (1 - SHRINKAGE) * balancer.coefficients.numpy() + SHRINKAGE / len(gram)
        return alpha * inverse_norms(gram)

    return {
        "min-norm of the batch": lambda data, batch: weights_of(data.between(batch, batch)),
        "equal coefficients": lambda data, batch: inverse_norms(data.between(batch, batch)),
        f"shrunk to equal by {SHRINKAGE:g}": shrunk,
        f"Gramian averaged over batches, {MEMORY:g}": averaged,
        "U-statistic Gramian": lambda data, batch: weights_of(data.unbiased(batch)),
    }


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Collect per-group gradients for each seed, then draw batches of every size."""
    from benchmarks.evidence.probe import group_gradients

    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        data = group_gradients(store, seed=seed, quick=quick)
        for size in [size for size in BATCH_SIZES if size <= data.groups // 2]:
            rows += [{"seed": seed, "batch": size, **row} for row in _judge(data, size, np.random.default_rng(seed))]
    sizes = sorted({row["batch"] for row in rows})
    lines = []
    for method in estimators():
        cells = [
            interval([row["opposed"] for row in rows if row["method"] == method and row["batch"] == size])
            for size in sizes
        ]
        lines.append(
            [method, *(f"{100 * cell.mean:.0f} % [{100 * cell.low:.0f}, {100 * cell.high:.0f}]" for cell in cells)]
        )
    return Result(
        name="noise",
        settings={"seeds": seeds, "batches": BATCHES, "memory": MEMORY, "shrinkage": SHRINKAGE},
        rows=rows,
        tables=[
            Table(
                "Batches whose direction opposes an expected gradient",
                ["prompt groups in a batch", *map(str, sizes)],
                lines,
            )
        ],
        notes=[
            "Share of batches with a negative inner product with at least one reward's gradient as estimated from all "
            "groups outside the batch. Mean over seeds [95 % bootstrap interval over seeds]. Centered rows, untrained "
            "policy.",
        ],
        figures={"evidence-noise": _figure(rows, sizes)},
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
    picture, axes = figure(2, height=2.8)
    for axis, key, label in zip(
        axes[0],
        ("opposed", "worst"),
        ("share of batches that oppose one", "worst cosine with an expected gradient"),
        strict=True,
    ):
        for method in estimators():
            means = [np.mean([r[key] for r in rows if r["method"] == method and r["batch"] == size]) for size in sizes]
            axis.plot(sizes, means, marker="o", label=method)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, sizes)
        axis.set_xlabel("prompt groups in a batch")
        axis.set_ylabel(label)
    axes[0][0].legend(fontsize=7)
    return picture
