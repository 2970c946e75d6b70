"""The main example as a user runs it: a process of its own, killed, resumed, and compared with an unbroken run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import example_process
from example_process import SHORT_RUN, finish


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return example_process.start(
        "sd35_marble.py", *SHORT_RUN, "--epochs=4", "run.report_every=2", f"--output={folder}", *words
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an unbroken run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert "report.html" in finish(start(folder))
    return folder


@pytest.mark.parametrize("rows_before_kill", [1, 3])
def test_killed_and_resumed_run_equals_the_unbroken_one(whole: Path, tmp_path: Path, rows_before_kill: int) -> None:
    folder = tmp_path / "killed"
    process = start(folder)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < rows_before_kill:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    finish(start(folder, "--resume"))
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    evaluation = "evaluations/epoch-0004.json"
    assert (folder / evaluation).read_bytes() == (whole / evaluation).read_bytes()


def test_metrics_hold_all_five_rewards_and_the_balance(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rewards = {"saturation", "contrast", "background", "ocr", "geneval"}
    training = [row for row in rows if row["kind"] == "train"]
    assert [row["refreshed"] for row in training] == [True, False, True, False]
    assert training[0]["collector"] == "linear"
    assert all(set(row["weights"]) == set(row["rewards"]) == rewards for row in training)
    assert [row["epoch"] for row in rows if row["kind"] == "eval"] == [0, 2, 4]


def test_another_run_in_the_folder_is_refused(whole: Path) -> None:
    process = start(whole)
    output = process.communicate(timeout=600)[0]
    assert process.returncode != 0
    assert "--resume" in output
    assert "--overwrite" in output


def test_checkpoint_loads_in_plain_diffusers_and_gives_the_trained_pictures(whole: Path) -> None:
    from gradbalance_diffusers.assembly import load_policy
    from gradbalance_diffusers.config import load_config
    from gradbalance_diffusers.tiny import load_tiny_sd3

    checkpoint = whole / "checkpoints" / "step-000004" / "default"
    policy = load_policy(load_config("tiny", ["model.device=cpu"]).model, seed=3)
    policy.load_lora(checkpoint)
    plain = load_tiny_sd3()
    untrained = picture(plain)
    plain.load_lora_weights(checkpoint)
    trained = picture(plain)
    assert not torch.equal(trained, untrained)
    with policy.role("default"):
        assert torch.equal(picture(policy.pipeline), trained)


def picture(pipeline: object) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        'a blue sign that says "42" on a white background',
        num_inference_steps=4,
        guidance_scale=1.0,
        max_sequence_length=0,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
