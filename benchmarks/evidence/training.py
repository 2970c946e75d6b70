"""Training runs of the tiny SD3, each in a process of its own; an interrupted run is resumed, a finished one kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.report import ROOT
from gradbalance_diffusers.report_data import read_run

# Small enough for many runs: half of the preset's epochs on half of its prompts, evaluated at the end alone.
SHORT = ("run.epochs=20", "prompts.groups_per_epoch=12", "evaluation.every=20", "evaluation.prompts_per_source=128")
QUICK = (
    "run.epochs=2", "prompts.groups_per_epoch=8", "prompts.images_per_prompt=4", "evaluation.prompts_per_source=2",
    "evaluation.every=1",
)  # fmt: skip
EXAMPLE = ROOT / "examples" / "sd35_marble.py"


@dataclass(frozen=True)
class TrainingRun:
    """One run of ``examples/sd35_marble.py`` on the tiny preset.

    Attributes:
        name: Of the variant: of its folder and of its row in tables.
        seed: Of the run.
        overrides: ``section.key=value`` each.
        program: What to run in place of the example, with the same options.
    """

    name: str
    seed: int
    overrides: tuple[str, ...] = ()
    program: tuple[str, ...] = (str(EXAMPLE),)


def train_all(runs: Sequence[TrainingRun], folder: Path, *, workers: int, quick: bool) -> None:
    """Finish all runs, ``workers`` at a time with one thread each.

    Raises:
        RuntimeError: A run failed; its last lines of output are shown. The others are finished first.
    """
    failures = []
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(runs), desc="training runs", dynamic_ncols=True) as bar:
        futures = {pool.submit(_train, run, folder, quick): run for run in runs}
        for future in as_completed(futures):
            if error := future.result():
                failures.append(f"{futures[future]}:\n{error}")
            bar.update()
    if failures:
        raise RuntimeError("\n\n".join(failures))


def place(run: TrainingRun, folder: Path) -> Path:
    """The folder of a run."""
    return folder / "training" / run.name / f"seed-{run.seed}"


def _train(run: TrainingRun, folder: Path, quick: bool) -> str:
    path = place(run, folder)
    if (path / "finished").exists():
        return ""
    resumed = ["--resume"] if (path / "config.yaml").exists() else []
    command = [
        sys.executable, *run.program, "--preset=tiny", f"--seed={run.seed}", "--threads=1", f"--output={path}",
        *resumed, "evaluation.every=10", *run.overrides, *(QUICK if quick else ()),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        return (done.stdout + done.stderr)[-2000:]
    (path / "finished").touch()
    return ""


def changes(runs: Sequence[TrainingRun], folder: Path) -> tuple[list[str], NDArray[np.float64]]:
    """Reward names and paired changes on the held-out prompts, ``[runs, evaluations after the first, rewards]``."""
    rows, names = [], []
    for run in runs:
        data = read_run(place(run, folder))
        names = list(data.rewards)
        rows.append([[e["change"][name]["mean"] for name in names] for e in data.evaluations if e["change"]])
    return names, np.array(rows)
