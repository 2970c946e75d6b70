"""Five rewards of which some truly conflict: what each method gives up for what.

The five rewards of the preset hardly conflict. Here small JPEG files take the place of a clean background: what makes
pictures small makes them pale and plain, and costs objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.evidence.comparison import NOTE, Comparison
from benchmarks.evidence.statistics import interval
from benchmarks.evidence.store import Store
from benchmarks.evidence.training import SHORT, TrainingRun, place, train_all
from benchmarks.report import Result, Table
from gradbalance_diffusers.report_data import read_run

REWARDS = "rewards=[saturation, contrast, jpeg_compressibility, ocr, {name: geneval, kind: geneval_geometry}]"
# Rows on every step, for the estimate of expected cosines.
METHODS = {
    "marble": ("balance.method=marble", "balance.interval=1"),
    "marble, N = 8": ("balance.method=marble",),
    "marble, shrinkage 0.3": ("balance.method=marble", "balance.interval=1", "balance.shrinkage=0.3"),
    "mean": ("balance.method=mean",),
    "weighted-sum": ("balance.method=weighted-sum",),
    "nash": ("balance.method=nash", "balance.interval=1"),
}


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train each method on each seed."""
    runs = {name: [_run(name, seed) for seed in range(seeds)] for name in METHODS}
    train_all([runs[name][s] for s in range(seeds) for name in METHODS], store.folder, workers=workers, quick=quick)
    found = Comparison.of(runs, store, reference="marble")
    pairs = _pairs(runs["marble"], store)
    return Result(
        name="conflict",
        settings={"seeds": seeds, "rewards": list(found.rewards), "overrides": [*SHORT, REWARDS]},
        rows=[*found.rows(), *pairs],
        tables=[_pair_table(pairs), *found.tables("Change on held-out prompts after 20 epochs")],
        notes=[
            NOTE,
            "Cosines of expected gradients: `gb.ConflictMeter` over the 20 steps of each run of marble, as the report "
            "of a run shows them; in one batch: of the same rows, averaged over steps.",
        ],
        figures={"evidence-conflict": found.figure("change on held-out prompts", relative=False)},
    )


def _run(name: str, seed: int) -> TrainingRun:
    folder = "conflict/" + name.replace(", N = ", "-").replace(", shrinkage ", "-shrinkage-")
    return TrainingRun(folder, seed, (*SHORT, REWARDS, *METHODS[name]))


def _pairs(runs: Sequence[TrainingRun], store: Store) -> list[dict[str, Any]]:
    """Cosines of every pair of rewards, one per seed."""
    cosines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in runs:
        measured = read_run(place(one, store.folder)).measured
        for pair in measured["expected"]["pairs"] if measured else ():
            first, second = sorted((pair["first"], pair["second"]))
            cosines.setdefault((first, second), []).append(pair)
    return [
        {
            "pair": list(names),
            "expected": [pair["cosine"] for pair in own],
            "in_batch": [pair["in_batch"] for pair in own],
        }
        for names, own in cosines.items()
    ]


def _pair_table(pairs: Sequence[dict[str, Any]]) -> Table:
    lines: list[tuple[float, list[str]]] = []
    for row in pairs:
        # None: noise hid the length of an expected gradient in that run.
        expected = [cosine for cosine in row["expected"] if cosine is not None]
        cells = [str(interval(expected)) if expected else "", str(interval(row["in_batch"]))]
        lines.append((float(np.mean(expected)) if expected else np.inf, [" – ".join(row["pair"]), *cells]))
    columns = ["", "cosine of expected gradients", "in one batch"]
    return Table("Do they conflict?", columns, [cells for _, cells in sorted(lines)])
