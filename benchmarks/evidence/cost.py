"""What balancing adds to an epoch, sampling and scoring included (paper Table 2), on the tiny SD3.

All arms live in one process and take turns epoch by epoch, each with a policy of its own and in CPU time.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.evidence.statistics import interval
from benchmarks.evidence.store import Store
from benchmarks.evidence.trainer import trainer_in
from benchmarks.memory import peak_bytes
from benchmarks.report import COLORS, Result, Table, figure, mebibytes
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.trainer import NFTTrainer
from gradbalance_diffusers.update import StepResult

BASELINE = "weighted sum"
INTERVAL = 10
# measure_conflicts is a diagnosis, not a part of the method.
COMMON = ("balance.measure_conflicts=false",)
ARMS: dict[str, tuple[str, ...]] = {
    BASELINE: ("balance.method=weighted-sum",),
    f"MARBLE, N = {INTERVAL}": ("balance.method=marble", f"balance.interval={INTERVAL}"),
    "MARBLE every step, K + 1 passes": ("balance.method=marble", "balance.interval=1", "balance.collector=passes"),
    "MARBLE every step, linear": ("balance.method=marble", "balance.interval=1", "balance.collector=linear"),
}
QUICK = ("prompts.groups_per_epoch=8", "prompts.images_per_prompt=4")


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Time two whole intervals of every arm; one process whatever ``seeds`` and ``workers`` are."""
    kept = store.get("cost", lambda: _measure(2 if quick else 2 * INTERVAL, QUICK if quick else ()))
    base, total = np.array(kept[BASELINE]["total"]), {}
    lines = []
    for arm, measured in kept.items():
        own = np.array(measured["total"])
        total[arm] = float(base.sum() / own.sum())
        training = sum(kept[BASELINE]["training"]) / sum(measured["training"])
        peak = measured["peak"]
        lines.append([
            arm, f"{own.mean():.2f}", f"{total[arm]:.3f}", str(interval(base / own)), f"{training:.3f}",
            f"{mebibytes(peak)} ({peak / kept[BASELINE]['peak']:.3f}×)",
        ])  # fmt: skip
    return Result(
        name="cost",
        settings={"arms": ARMS, "common": COMMON},
        rows=[{"arm": arm, **measured, "speed": total[arm]} for arm, measured in kept.items()],
        tables=[
            Table(
                "An epoch of 192 pictures",
                ["", "CPU s", "speed", "epoch by epoch", "training part alone", "peak memory, MiB"],
                lines,
            )
        ],
        notes=[
            f"Speed: CPU time of {BASELINE} over own CPU time, {len(base)} epochs each in turns, one thread; beside it "
            "the mean over epochs [95 % bootstrap interval]. An epoch samples and scores 192 pictures and makes one "
            "optimizer step on two noise levels of each.",
            "Peak memory: tensors alive at once in an epoch that looks at all gradients, from the events of torch's "
            "allocator, above what was alive before; parameters and Adam moments not counted.",
        ],
        figures={"evidence-cost": _figure(kept)},
    )


def _measure(rounds: int, size: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainers = {}
        for arm, overrides in ARMS.items():
            folder = stack.enter_context(RunFolder(place / str(len(trainers))))
            trainers[arm] = trainer_in(folder, load_config("tiny", [*COMMON, *size, *overrides]))
        peaks = {arm: peak_bytes(partial(trainer.train_epoch, 0)) for arm, trainer in trainers.items()}
        found: dict[str, dict[str, Any]] = {arm: {"total": [], "training": [], "peak": peaks[arm]} for arm in ARMS}
        order, shuffle = list(ARMS), random.Random(0).shuffle
        # Refreshes of N = 10 fall on two of twenty epochs wherever one begins.
        for epoch in tqdm(range(1, rounds + 1), desc="epochs of every arm"):
            shuffle(order)
            for arm in order:
                total, training = _cpu_times(trainers[arm], epoch)
                found[arm]["total"].append(total)
                found[arm]["training"].append(training)
    return found


def _cpu_times(trainer: NFTTrainer, epoch: int) -> tuple[float, float]:
    """CPU seconds of an epoch, and of its optimizer steps."""
    step, training = trainer.update.step, 0.0

    def timed(*arguments: Any) -> StepResult:
        nonlocal training
        start = time.process_time()
        result = step(*arguments)
        training += time.process_time() - start
        return result

    gc.collect()
    with patch.object(trainer.update, "step", timed):
        start = time.process_time()
        trainer.train_epoch(epoch)
        return time.process_time() - start, training


def _figure(kept: dict[str, dict[str, Any]]) -> Figure:
    picture, axes = figure(1, height=2.0)
    picture.set_size_inches(6.5, 2.0)
    axis = axes[0][0]
    for position, measured in enumerate(kept.values()):
        total, training = np.mean(measured["total"]), np.mean(measured["training"])
        axis.barh(position, total - training, color="#8d99ae", label="sampling and scoring" if not position else None)
        axis.barh(
            position, training, left=total - training, color=COLORS["gradbalance"],
            label=None if position else "optimizer step",
        )  # fmt: skip
    axis.set_yticks(range(len(kept)), list(kept))
    axis.invert_yaxis()
    axis.set_xlabel("CPU seconds of an epoch")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture
