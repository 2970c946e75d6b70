"""A rank that fails ends the job on all ranks, in a stated time, with the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch
from torch import distributed as dist
import gradbalance as gb

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
way, rank = sys.argv[1], dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = gb.BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gb.MARBLE(interval=2), ranks="average")
for step in range(6):
    if step == 3 and rank == 1:
        if way == "raise":
            raise ValueError("the reward server is gone")
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    y = model(torch.ones(2, 3) * (rank + 1))
    optimizer.backward({"a": y[:, 0].mean(), "b": y[:, 1].square().mean()})
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step}", flush=True)
"""
# Start-up of two processes on a busy machine, the 10 s of the collectives, and torchrun's own end.
LIMIT = 120


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("raise", "ValueError: the reward server is gone"),
        pytest.param("kill", "Signal 9 (SIGKILL)", marks=pytest.mark.slow),
        pytest.param("hang", "Timed out waiting 10000ms", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_job_with_the_cause(way: str, cause: str, tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), way]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode != 0
    assert "rank 0 step 2" in run.stdout
    assert "step 3" not in run.stdout
    assert run.stderr.count(cause) == 1, run.stderr
