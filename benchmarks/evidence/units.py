"""What happens when one reward is counted in another unit: multiplied by 0.05 and by 20, or shifted by 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.evidence.store import Store
from benchmarks.evidence.training import SHORT, TrainingRun, changes, train_all
from benchmarks.report import Result, Table, figure
from gradbalance_diffusers.rewards import make_reward

REWARD = "ocr"
METHODS = ("weighted-sum", "mean", "marble")
UNITS: dict[str, tuple[float, float]] = {
    "x 1": (1.0, 0.0),
    "x 0.05": (0.05, 0.0),
    "x 20": (20.0, 0.0),
    "+ 1": (1.0, 1.0),
}
# Advantages are divided by the standard deviation plus this; the published 1e-4 is a unit of its own.
NO_EPSILON = "loss.advantage_epsilon=0"


def in_unit(kind: str, scale: float, shift: float, **options: Any) -> Callable[..., torch.Tensor]:
    """The reward ``kind`` as ``scale * reward + shift``; missing scores stay missing."""
    reward = make_reward(kind, **options)

    def scored(images: torch.Tensor, prompts: list[str], **metadata: list[Any]) -> torch.Tensor:
        scores = [float("nan") if score is None else float(score) for score in reward(images, prompts, **metadata)]
        return scale * torch.tensor(scores, dtype=torch.float64) + shift

    return scored


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train each method with each unit on seed 0; scores are turned back to the plain unit for the comparison."""
    runs = {(method, unit): _run(method, unit) for method in METHODS for unit in UNITS}
    train_all(list(runs.values()), store.folder, workers=workers, quick=quick)
    final: dict[tuple[str, str], list[float]] = {}
    rewards: list[str] = []
    for key, one in runs.items():
        rewards, values = changes([one], store.folder)
        last = values[0, -1]
        last[rewards.index(REWARD)] /= UNITS[key[1]][0]
        final[key] = last.tolist()
    lines = [[method, unit, *(f"{value:+.3f}" for value in final[method, unit])] for method, unit in runs]
    moved = {
        method: max(
            float(np.abs(np.subtract(final[method, unit], final[method, "x 1"])).max())
            for unit in UNITS
            if unit != "x 1"
        )
        for method in METHODS
    }
    return Result(
        name="units",
        settings={"reward": REWARD, "units": UNITS, "seed": 0},
        rows=[{"method": method, "unit": unit, "final": values} for (method, unit), values in final.items()],
        tables=[Table(f"Change on held-out prompts; {REWARD} in other units", ["method", REWARD, *rewards], lines)],
        notes=[
            f"Largest movement of any reward's result: {', '.join(f'{m} {v:.1e}' for m, v in moved.items())}. "
            "One seed for all.",
        ],
        figures={"evidence-units": _figure(final, rewards)},
    )


def _run(method: str, unit: str) -> TrainingRun:
    scale, shift = UNITS[unit]
    options = f"{{kind: {REWARD}, scale: {scale}, shift: {shift}}}"
    rewards = ", ".join(
        f"{{name: {REWARD}, kind: 'benchmarks.evidence.units:in_unit', options: {options}}}" if name == REWARD else name
        for name in ("saturation", "contrast", "background", REWARD, "{name: geneval, kind: geneval_geometry}")
    )
    overrides = (*SHORT, f"balance.method={method}", NO_EPSILON, f"rewards=[{rewards}]")
    return TrainingRun(f"units-{method}-{unit.replace(' ', '')}", 0, overrides)


def _figure(final: dict[tuple[str, str], list[float]], rewards: Sequence[str]) -> Figure:
    picture, axes = figure(len(METHODS), height=2.8)
    for axis, method in zip(axes[0], METHODS, strict=True):
        for place, unit in enumerate(UNITS):
            positions = np.arange(len(rewards)) + 0.2 * (place - 1.5)
            axis.bar(positions, final[method, unit], width=0.18, label=f"{REWARD} {unit}")
        axis.axhline(0, color="0.6", linewidth=1)
        axis.set_xticks(range(len(rewards)), rewards, rotation=30, ha="right", fontsize=7)
        axis.set_title(method, fontsize=9, loc="left")
        axis.set_ylim(min(0.0, *(min(v) for v in final.values())) - 0.01, max(max(v) for v in final.values()) + 0.02)
    axes[0][0].set_ylabel("change on held-out prompts")
    handles, labels = axes[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))
    return picture
