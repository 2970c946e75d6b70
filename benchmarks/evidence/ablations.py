"""MARBLE with one thing changed: interval, smoothing, cached quantity, centering, a uniform end (paper Table S4)."""

from __future__ import annotations

import re

from benchmarks.evidence.comparison import NOTE, Comparison
from benchmarks.evidence.store import Store
from benchmarks.evidence.training import SHORT, TrainingRun, train_all
from benchmarks.report import Result

MARBLE = "balance.method=marble"
VARIANTS: dict[str, tuple[str, ...]] = {
    "marble": (MARBLE,),  # N = 8, rho = 0.7, centered, exact masks, the direction cached
    **{f"N = {n}": (MARBLE, f"balance.interval={n}") for n in (1, 5, 10, 20)},
    "no normalization": ("balance.method=mgda-raw",),
    "fixed coefficients": ("balance.method=mean",),
    "uniform from the 15th step": (MARBLE, "balance.uniform_after=15"),
    "coefficients cached (published)": (MARBLE, "balance.amortize=coefficients"),
    "missing = advantage 0 (published)": (MARBLE, "loss.missing=zero"),
    "not centered (published)": (MARBLE, "loss.center=false"),
    "solved on the first micro-batch (published)": (MARBLE, "balance.measure_conflicts=false"),
}
# Smoothing has a say only after the second refresh, and the runs are 20 steps long: so a refresh on every other step.
SMOOTHING: dict[str, tuple[str, ...]] = {
    f"N = 2, rho = {decay:g}": (MARBLE, "balance.interval=2", f"balance.ema_decay={decay:g}")
    for decay in (0.7, 0.1, 0.3, 0.5, 0.9)
}
PROGRAMS = {"solved on the first micro-batch (published)": ("-m", "benchmarks.evidence.first_batch")}


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train each variant on each seed."""
    every = {**VARIANTS, **SMOOTHING}
    runs = {name: [_run(name, every[name], seed) for seed in range(seeds)] for name in every}
    # Seed by seed, so that an interrupted experiment has whole seeds.
    train_all([runs[name][s] for s in range(seeds) for name in every], store.folder, workers=workers, quick=quick)
    found = Comparison.of({name: runs[name] for name in VARIANTS}, store, reference="marble")
    smoothed = Comparison.of({name: runs[name] for name in SMOOTHING}, store, reference="N = 2, rho = 0.7")
    label = "difference to {} on held-out prompts"
    return Result(
        name="ablations",
        settings={"seeds": seeds, "rewards": list(found.rewards), "overrides": list(SHORT), "variants": every},
        rows=[*found.rows(), *smoothed.rows()],
        tables=[
            *found.tables("Change on held-out prompts after 20 epochs"),
            *smoothed.tables("Smoothing: change on held-out prompts after 20 epochs"),
        ],
        notes=[NOTE],
        figures={
            "evidence-ablations": found.figure(label.format(found.reference), relative=True),
            "evidence-ablations-smoothing": smoothed.figure(label.format(smoothed.reference), relative=True),
        },
    )


def _run(name: str, overrides: tuple[str, ...], seed: int) -> TrainingRun:
    folder = "ablations/" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    program = {"program": PROGRAMS[name]} if name in PROGRAMS else {}
    return TrainingRun(folder, seed, (*SHORT, *overrides), **program)
