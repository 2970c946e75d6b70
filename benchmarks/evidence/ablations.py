"""MARBLE with one thing changed: interval, smoothing, cached quantity, centering, a uniform end (paper Table S4)."""

from __future__ import annotations

from benchmarks.evidence.learning import compare
from benchmarks.evidence.store import Store
from benchmarks.evidence.training import TrainingRun, train_all
from benchmarks.report import Result

MARBLE = ("balance.method=marble",)
# "marble" is the run of the learning experiment: N = 8, rho = 0.7, centered. The mean (fixed coefficients) and MGDA
# without normalization are there too.
VARIANTS: dict[str, tuple[str, ...]] = {
    "marble": (),
    **{f"interval-{n}": (f"balance.interval={n}",) for n in (1, 5, 20)},
    **{f"ema-{decay:g}": (f"balance.ema_decay={decay:g}",) for decay in (0.1, 0.3, 0.5, 0.9)},
    "coefficients": ("balance.amortize=coefficients",),
    "missing-zero": ("loss.missing=zero",),
    "not-centered": ("loss.center=false",),
    "uniform-end": ("balance.uniform_after=30",),
}


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train each variant on each seed."""
    runs = {
        name: [TrainingRun(name, seed, (*MARBLE, *extra)) for seed in range(seeds)] for name, extra in VARIANTS.items()
    }
    train_all([runs[name][s] for s in range(seeds) for name in VARIANTS], store.folder, workers=workers, quick=quick)
    return compare("ablations", runs, store, reference="marble", title="Change on held-out prompts")
