"""All rewards over training at equal budget: MARBLE against the weighted sum, the mean, Nash-MTL and plain MGDA."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.evidence.comparison import NOTE, Comparison
from benchmarks.evidence.store import Store
from benchmarks.evidence.training import TrainingRun, place, train_all
from benchmarks.report import Result, figure
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
    found = Comparison.of(runs, store, reference="marble")
    return Result(
        name="learning",
        settings={"seeds": seeds, "rewards": list(found.rewards)},
        rows=found.rows(),
        tables=found.tables("Change on held-out prompts"),
        notes=[NOTE],
        figures={"evidence-learning": _figure(runs["marble"][0], found, store)},
    )


def _figure(first: TrainingRun, found: Comparison, store: Store) -> Figure:
    columns = 3
    lines = -(-(len(found.rewards) + 1) // columns)  # one place is for the legend
    picture, grid = figure(columns, lines, height=2.4)
    axes = grid.flatten()
    epochs = [row["epoch"] for row in read_run(place(first, store.folder)).evaluations if row["change"]]
    for k, (axis, reward) in enumerate(zip(axes, found.rewards, strict=False)):
        for method, values in found.curves.items():
            mean, low, high = values[:, :, k].mean(0), values[:, :, k].min(0), values[:, :, k].max(0)
            axis.plot([0, *epochs], [0.0, *mean], color=COLORS[method], label=method, marker="o", markersize=3)
            axis.fill_between([0, *epochs], [0.0, *low], [0.0, *high], color=COLORS[method], alpha=0.10, linewidth=0)
        axis.axhline(0, color="0.6", linewidth=1, zorder=0)
        axis.set_title(reward, fontsize=9, loc="left")
        axis.set_xlabel("epoch")
    handles, labels = axes[0].get_legend_handles_labels()
    for axis in axes[len(found.rewards) :]:
        axis.set_axis_off()
    axes[len(found.rewards)].legend(
        handles, labels, loc="center", title="change on held-out prompts,\nmean and range of seeds"
    )
    return picture
