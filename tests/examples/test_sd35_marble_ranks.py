"""The main example under torchrun and accelerate launch: the training of one process, also killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import example_process
from example_process import SHORT_RUN, finish
from run_records import assert_close, logged

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "python": ["-u"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "accelerate": [
        *["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"],
        *["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"],
    ],
}


def start(launcher: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    options = [*SHORT_RUN, "--epochs=2", "run.timeout=60", f"--output={folder}"]
    return example_process.start("sd35_marble.py", *options, *words, launcher=LAUNCHERS[launcher])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    finish(start("python", folder))
    return folder


def assert_same_training(folder: Path, alone: Path) -> None:
    assert_close(logged(folder), logged(alone))
    for role in ("default", "old"):
        files = [
            load_file(run / "checkpoints" / f"step-00000{step}" / role / "pytorch_lora_weights.safetensors")
            for run, step in ((alone, 1), (alone, 2), (folder, 2))
        ]
        before, expected, found = (torch.cat([file[name].flatten() for name in files[0]]) for file in files)
        assert torch.linalg.vector_norm(found - expected) < 1e-3 * torch.linalg.vector_norm(expected - before)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_as_one(launcher: str, alone: Path, tmp_path: Path) -> None:
    output = finish(start(launcher, tmp_path / "run"))
    assert output.count("Report: ") == 1
    assert output.count("Estimate for each of 2 processes") == 1
    assert_same_training(tmp_path / "run", alone)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_and_the_last_checkpoint_continues(rank: int, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("torchrun", folder)
    deadline = time.monotonic() + 300
    while not (folder / "checkpoints" / "step-000001").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(worker(process.pid, rank), signal.SIGKILL)
    output = process.communicate(timeout=100)[0]
    assert process.returncode != 0
    assert "SIGKILL" in output
    finish(start("torchrun", folder, "--resume"))
    assert_same_training(folder, alone)


def worker(launcher: int, rank: int) -> int:
    """Process of a rank, a child of its launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(child)
    raise AssertionError(f"no process of rank {rank}")
