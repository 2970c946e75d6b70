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
    **{f"rho = {decay:g}": (MARBLE, f"balance.ema_decay={decay:g}") for decay in (0.1, 0.3, 0.5, 0.9)},
    "no normalization": ("balance.method=mgda-raw",),
    "fixed coefficients": ("balance.method=mean",),
    "uniform from the 15th step": (MARBLE, "balance.uniform_after=15"),
    "coefficients cached (published)": (MARBLE, "balance.amortize=coefficients"),
    "missing = advantage 0 (published)": (MARBLE, "loss.missing=zero"),
    "not centered (published)": (MARBLE, "loss.center=false"),
    "solved on the first micro-batch (published)": (MARBLE, "balance.measure_conflicts=false"),
}
PROGRAMS = {"solved on the first micro-batch (published)": ("-m", "benchmarks.evidence.first_batch")}


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train each variant on each seed."""
    runs = {name: [_run(name, seed) for seed in range(seeds)] for name in VARIANTS}
    # Seed by seed, so that an interrupted experiment has whole seeds.
    train_all([runs[name][s] for s in range(seeds) for name in VARIANTS], store.folder, workers=workers, quick=quick)
    found = Comparison.of(runs, store, reference="marble")
    return Result(
        name="ablations",
        settings={"seeds": seeds, "rewards": list(found.rewards), "overrides": list(SHORT)},
        rows=found.rows(),
        tables=found.tables("Change on held-out prompts after 20 epochs"),
        notes=[NOTE],
        figures={"evidence-ablations": found.figure("difference to marble on held-out prompts", relative=True)},
    )


def _run(name: str, seed: int) -> TrainingRun:
    folder = "ablations/" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    program = {"program": PROGRAMS[name]} if name in PROGRAMS else {}
    return TrainingRun(folder, seed, (*SHORT, *VARIANTS[name]), **program)
