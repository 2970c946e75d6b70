"""Processes of one job: who prints, how they end, and that the cause is told once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.session import distributed_session, first_rank_prints

SCRIPT = """
import os, signal, sys
import torch
from gradbalance import RanksError, distributed
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.rewards import RewardError
from gradbalance_diffusers.session import distributed_session

way, options = sys.argv[1], sys.argv[2:]
if way == "differ" and os.environ["RANK"] == "1":
    options.append("optimizer.lr=0.5")
with distributed_session(load_config("tiny", ["run.timeout=30", *options])) as ranks:
    print(f"rank {ranks.rank} of {ranks.size}")
    rows = distributed.gather_samples(torch.tensor([ranks.rank]))
    if way == "all":
        raise RanksError("all ranks know this")
    if ranks.rank == 1 and way == "reward":
        raise RewardError("Reward 'ocr' raised ValueError: the server is gone", "ocr", 0)
    if ranks.rank == 1 and way == "bug":
        raise KeyError("nobody expected this")
    if ranks.rank == 1 and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    rows = distributed.gather_samples(rows)
    print("sum", int(rows.sum()))
"""
# Start-up on a busy machine, and the 30 s of the collectives.
LIMIT = 150


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(script: Path, *words: str) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of two ranks that no launcher watches over."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), *words],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [job.communicate(timeout=LIMIT) for job in jobs]
    return [(job.returncode, *output) for job, output in zip(jobs, outputs, strict=True)]


def test_only_the_first_rank_prints(script: Path) -> None:
    (code, output, _), other = run(script, "none")
    assert (code, output) == (0, "rank 0 of 2\nsum 2\n")
    assert other[:2] == (0, "")


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("reward", "RewardError: Reward 'ocr' raised ValueError: the server is gone"),
        pytest.param("bug", "KeyError: 'nobody expected this'", marks=pytest.mark.slow),
        pytest.param("all", "RanksError: all ranks know this", marks=pytest.mark.slow),
        pytest.param("differ", "instead of 'lr: ", marks=pytest.mark.slow),
    ],
)
def test_a_failure_ends_all_ranks_and_is_told_once(script: Path, way: str, cause: str) -> None:
    results = run(script, way)
    assert [code for code, _, _ in results] == [1, 1]
    told = "".join(error for _, _, error in results)
    assert told.count(cause) == 1, told
    assert told.count("which ends the job") == 1
    assert ("Traceback" in told) == (way == "bug")


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(script: Path) -> None:
    (code, _, error), (other, _, _) = run(script, "kill")
    assert (code, other) == (1, -signal.SIGKILL)
    assert error.count("which ends the job") == 1


def test_one_process_needs_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with distributed_session(load_config("tiny")) as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert not torch.distributed.is_initialized()
    with pytest.raises(KeyError), distributed_session(load_config("tiny")):
        raise KeyError("as it is")


def test_a_launcher_that_starts_one_process_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.warns(RuntimeWarning, match="--multi_gpu"), distributed_session(load_config("tiny")) as ranks:
        assert ranks.size == 1


def test_other_ranks_say_nothing_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, expected in (("0", "said\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with first_rank_prints():
            print("said")
            print("said", file=sys.stderr)
        assert tuple(capsys.readouterr()) == (expected, expected)
