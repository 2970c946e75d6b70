"""The evaluation as a user runs it: at once, step by step, and killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from runpy import run_path

import pytest
import torch

import example_process
from gradbalance_diffusers.assembly import load_policy
from gradbalance_diffusers.config import load_config

ROOT = Path(__file__).resolve().parents[2]
METRICS = ["saturation", "contrast", "background", "ocr", "geneval"]


SCRIPT = ROOT / "examples" / "evaluate_sd35.py"


def evaluate(folder: Path, *arguments: str) -> None:
    """Run the example inside this process, which has imported everything already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT.name, f"--output={folder}", "--device=cpu", *arguments])
        run_path(str(SCRIPT), run_name="__main__")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    # As many threads as here: their number changes the last bits.
    options = [f"--output={folder}", "--device=cpu", *words]
    return example_process.start(SCRIPT.name, *options, threads=torch.get_num_threads())


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random LoRA for the tiny model, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("loras") / "random"
    policy = load_policy(load_config("tiny", ["model.device=cpu", "model.lora_rank=4"]).model, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters.values():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy.save_lora(folder)
    return folder


@pytest.fixture(scope="module")
def words(lora: Path) -> list[str]:
    """What is evaluated."""
    return ["base", f"random={lora}", "--prompts-per-source=2", "--samples=2", "--batch-size=3", "--steps=4"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Path:
    """Folder of an evaluation without interruption."""
    folder = tmp_path_factory.mktemp("evaluations") / "whole"
    evaluate(folder, *words)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_metric_of_the_preset_is_in_the_results(whole: Path) -> None:
    record = json.loads((whole / "results.json").read_text())
    assert [model["name"] for model in record["models"]] == ["base", "random"]
    for model in record["models"]:
        assert list(model["scores"]) == METRICS
        assert model["pictures"] == 12
        assert [model["scores"][name]["pictures"] for name in METRICS] == [12, 12, 12, 4, 4]
        assert not any(entry["unscored"] for entry in model["scores"].values())
    assert record["models"][1]["scores"]["saturation"]["change"]["mean"] != 0.0


def test_killed_and_started_again_gives_the_same_files(whole: Path, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "whole"  # the same name: the report tells it
    process = start(folder, *words)
    deadline = time.monotonic() + 600
    while len(list(folder.glob("models/random/images/*.png"))) < 4:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output = start(folder, *words).communicate(timeout=600)[0]
    assert "| random |" in output, output
    assert str(folder / "report.html") in output
    assert contents(folder) == contents(whole)


def test_steps_can_run_one_by_one_and_metrics_be_added_later(whole: Path, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    evaluate(folder, *words, "--only=generate")
    assert not list(folder.rglob("scores"))
    moved = folder.rename(tmp_path / "moved")  # scoring needs neither models nor prompt files
    evaluate(moved, "--only=score", "--metrics=saturation,contrast")
    evaluate(moved, "--only=score")  # everything that the folder was made for
    evaluate(moved, "--only=report")
    assert contents(moved) == contents(whole)


def test_an_untrained_lora_is_a_clear_error(tmp_path: Path) -> None:
    policy = load_policy(load_config("tiny", ["model.device=cpu", "model.lora_rank=4"]).model, seed=0)
    policy.save_lora(tmp_path / "untrained")
    with pytest.raises(SystemExit, match=r"^InvalidArgumentError: The LoRA .*untrained must change the model\."):
        evaluate(tmp_path / "out", f"new={tmp_path / 'untrained'}", "--prompts-per-source=1")
