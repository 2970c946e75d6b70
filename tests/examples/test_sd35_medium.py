"""The preset sd35-medium as a user runs it, every model replaced by a tiny one of the same class through its path."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from runpy import run_path

import pytest
from safetensors.torch import load_file

from stand_ins import save_stand_ins, stand_in_paths

ROOT = Path(__file__).resolve().parents[2]
REWARDS = ["pickscore", "hpsv2", "clipscore", "ocr", "geneval"]
# Fewer and smaller pictures, and what the stand-ins are smaller in; everything else is the preset.
SMALL = [
    *["model.device=cpu", "model.height=16", "model.width=16", "model.lora_rank=4", "model.max_sequence_length=5"],
    *["sampling.steps=3", "timesteps.per_image=2", "optimizer.micro_batch_size=5"],
    *["prompts.groups_per_epoch=3", "prompts.images_per_prompt=4"],
    *["evaluation.steps=2", "evaluation.prompts_per_source=2", "evaluation.saved_images=1", "evaluation.every=1"],
    *["run.checkpoint_every=1", "run.reward_timeout=600"],
]


def run(script: str, *arguments: str) -> None:
    """Run an example inside this process, which has imported everything already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        run_path(str(ROOT / "examples" / script), run_name="__main__")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command line of the preset on stand-ins."""
    return ["--preset=sd35-medium", *stand_in_paths(save_stand_ins(tmp_path_factory.mktemp("models"))), *SMALL]


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run("sd35_marble.py", *options, "--epochs=2", f"--output={folder}")
    return folder


def test_dry_run(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("sd35_marble.py", *options, "--dry-run", f"--output={tmp_path / 'run'}")
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    for words in ("device memory", *(f"scores of {name}" for name in REWARDS), "optimizer step"):
        assert words in out
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit) as end:
        run("sd35_marble.py", *options, "--dry-run", f"--output={tmp_path / 'run'}", "model.path=/no/such/model")
    assert end.value.code == 1
    assert "FAILED" in capsys.readouterr().out


def test_two_epochs_with_every_reward(whole: Path) -> None:
    log = rows(whole)
    assert [row["kind"] for row in log] == ["eval", "train", "eval", "train", "eval"]
    first, second = (row for row in log if row["kind"] == "train")
    assert [first["refreshed"], second["refreshed"]] == [True, False]
    assert first["collector"] == "linear"
    assert list(first["rewards"]) == list(first["weights"]) == REWARDS
    assert first["valid"] == {"pickscore": 12, "hpsv2": 12, "clipscore": 12, "ocr": 4, "geneval": 4}
    assert not any(first["masked_errors"].values())
    assert second["kl"] > 0


def test_a_resumed_run_is_the_unbroken_one(whole: Path, options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("sd35_marble.py", *options, "--epochs=1", f"--output={folder}")
    run("sd35_marble.py", *options, "--epochs=2", "--resume", f"--output={folder}")
    assert rows(folder)[-3:] == rows(whole)[-3:]
    for file in (whole / "checkpoints" / "step-000002").rglob("*.safetensors"):
        expected, found = load_file(file), load_file(folder / file.relative_to(whole))
        assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (["--resume", "optimizer.lr=0.5"], "from another configuration"),
        (["--overwrite", "model.path=/no/such/model"], "`model.path` must be a local path"),
        (["--overwrite", "run.trackers=[wandb]"], "pip install wandb"),
        (["--overwrite", "rewards=[{name: pickscore, options: {paht: x}}]"], "Did you mean 'path'"),
    ],
)
def test_a_mistake_costs_nothing(whole: Path, options: list[str], mistake: list[str], message: str) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises(SystemExit, match=message):
        run("sd35_marble.py", *options, "--epochs=3", f"--output={whole}", *mistake)
    assert contents() == before
    run("sd35_marble.py", *options, "--epochs=2", "--resume", f"--output={whole}")


def test_a_corrected_mistake_needs_no_new_folder(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run("sd35_marble.py", *options, f"--output={tmp_path / 'run'}", "model.path=/no/such/model")
    assert not (tmp_path / "run").exists()


def test_evaluation_of_the_run(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("evaluate_sd35.py", "base", f"trained={whole}", "--device=cpu", f"--output={tmp_path / 'evaluation'}")
    record = json.loads((tmp_path / "evaluation" / "results.json").read_text())
    scores = {model["name"]: model["scores"] for model in record["models"]}
    assert list(scores) == ["base", "trained"]
    for found in scores.values():
        assert set(found) == {*REWARDS, "aesthetic", "imagereward"}
    assert "| trained |" in capsys.readouterr().out
