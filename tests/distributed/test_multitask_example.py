"""The multi-task example under torchrun gives what it gives in one process."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradbalance import MARBLE, Fixed

EXAMPLE = Path(__file__).parents[2] / "examples" / "multitask.py"


def scores() -> list[dict[str, float]]:
    train = runpy.run_path(str(EXAMPLE))["train"]
    return [train(balancer, seed=0, epochs=2) for balancer in (MARBLE(interval=5), Fixed([1.0, 1.0, 1.0]))]


def test_scores_of_two_ranks_are_those_of_one(on_ranks: Any) -> None:
    first, second = on_ranks(2, scores)
    assert first == second
    for found, expected in zip(first, scores(), strict=True):
        # Accuracies move in steps of 1/597 on 597 held-out pictures.
        assert found == pytest.approx(expected, abs=2.1 / 597)


@pytest.mark.slow
def test_torchrun_prints_the_same_table(tmp_path: Path) -> None:
    arguments = [str(EXAMPLE), "--seeds", "2", "--epochs", "1", "--output", str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    tables = []
    for command in ([sys.executable, *arguments], [sys.executable, *launcher, *arguments]):
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        lines = [line.split() for line in run.stdout.splitlines() if "+-" in line]
        tables.append([[float(cell) for cell in line[1::2] if cell[0] in "-0123456789"] for line in lines])
    assert len(tables[0]) == 5
    for one, two in zip(*tables, strict=True):
        assert one == pytest.approx(two, abs=0.01)
