"""The examples as a user starts them: in a process of their own, which may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The tiny preset of examples/sd35_marble.py, made short.
SHORT_RUN = [
    "--preset=tiny",
    "--threads=1",
    "prompts.groups_per_epoch=8",
    "prompts.images_per_prompt=4",
    "evaluation.prompts_per_source=4",
    "evaluation.every=2",
    "balance.interval=2",
    "run.checkpoint_every=1",
]


def start(script: str, *words: str, launcher: Sequence[str] = (), threads: int = 1) -> subprocess.Popen[str]:
    """Start an example on the CPU, offline; what it writes to either stream is its output."""
    command = [sys.executable, *launcher, f"examples/{script}", *words]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a process that ends well."""
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return output
