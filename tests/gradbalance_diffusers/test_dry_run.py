"""A dry run checks everything, finds every fault, and leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradbalance_diffusers.checklist import Checklist
from gradbalance_diffusers.config import Config, load_config
from gradbalance_diffusers.dry_run import dry_run
from gradbalance_diffusers.run_folder import RunFolder
from small_run import SMALL


def small(pipeline_path: Path, folder: Path, *overrides: str) -> Config:
    return load_config("tiny", [*SMALL, f"model.path={pipeline_path}", f"run.folder={folder}", *overrides])


def faults(checks: Checklist) -> dict[str, str]:
    return {check.name: check.fault for check in checks.checks if check.fault is not None}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("run.mixed_precision=fp16", "model.gradient_checkpointing=true", "model.text_encoders=offload"),
        ("balance.method=weighted-sum", "optimizer.micro_batch_size=5", "loss.kl_weight=0.1"),
    ],
)
def test_a_sound_configuration_passes_and_nothing_is_written(
    pipeline_path: Path, tmp_path: Path, overrides: Sequence[str]
) -> None:
    checks = dry_run(small(pipeline_path, tmp_path / "run", *overrides))
    assert checks.faults == 0, checks.table()
    assert list(tmp_path.iterdir()) == []
    made = {check.name: check.detail for check in checks.checks}
    assert made["run folder"].endswith("a new run")
    assert made["training prompts: ocr"] == "15845 in tiny"
    assert made["prompts of an epoch"] == "general 1, ocr 2"
    assert "6 pictures in" in made["sampling"]
    assert set(made["scores of contrast"].replace(",", "").split()[::2]) == {"general", "ocr"}
    assert ("rows by linear" in made["optimizer step"]) == ("balance.method=weighted-sum" not in overrides)
    assert float(made["optimizer step"].rsplit(" ", 1)[1]) > 0.01
    assert not any(check.skipped for check in checks.checks)


def broken(images: Any, prompts: Any, **metadata: Any) -> list[float]:
    raise ConnectionError("the scorer is away")


def nothing(images: Any, prompts: Any, **metadata: Any) -> list[None]:
    return [None] * len(images)


def make_broken() -> Any:
    return broken


def make_nothing() -> Any:
    return nothing


def test_every_fault_is_found_in_one_run(pipeline_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rewards_of_a_user", __import__("sys").modules[__name__])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    rewards = "rewards=[contrast, {name: away, kind: 'rewards_of_a_user:make_broken'}, typo, "
    rewards += "{name: silent, kind: 'rewards_of_a_user:make_nothing'}, {name: masked, kind: "
    rewards += "'rewards_of_a_user:make_broken', on_error: mask}]"
    checks = dry_run(small(pipeline_path, tmp_path / "run", rewards, "run.trackers=[wandb]"))
    found = faults(checks)
    assert set(found) == {
        "run folder",
        "tracker wandb",
        "reward typo",
        "scores of away",
        "scores of silent",
        "scores of masked",
    }
    assert "holds no run" in found["run folder"]
    assert "the scorer is away" in found["scores of away"]
    assert "apply to a prompt of some source" in found["scores of silent"]
    table = checks.table()
    assert table.count(" FAILED ") == len(found)
    for fault in found.values():
        assert fault in table
    assert [check.name for check in checks.checks if check.skipped] == ["scores of typo"]
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "thesis.tex"]


def test_without_a_model_or_prompts_the_rest_is_checked_all_the_same(pipeline_path: Path, tmp_path: Path) -> None:
    (tmp_path / "ocr.txt").write_text("no quotes\n")
    sources = f"prompts.sources={{general: '{tmp_path}/absent.txt', ocr: '{tmp_path}/ocr.txt'}}"
    checks = dry_run(small(pipeline_path, tmp_path / "run", sources, f"model.path={tmp_path}/absent"))
    found = faults(checks)
    assert set(found) == {"training prompts: general", "training prompts: ocr", "model"}
    assert "line 1" in found["training prompts: ocr"]
    skipped = {check.name for check in checks.checks if check.skipped}
    assert skipped == {
        "prompts of an epoch",
        "sampling",
        *(f"scores of {name}" for name in ("saturation", "contrast", "background")),
        "optimizer step",
    }


def test_only_sources_that_are_drawn_are_tried(pipeline_path: Path, tmp_path: Path) -> None:
    """A reward for prompts that are read but never drawn would have no signal."""
    options = ["prompts.mix={general: 1}", "rewards=[contrast, ocr]"]
    checks = dry_run(small(pipeline_path, tmp_path / "run", *options))
    assert set(faults(checks)) == {"scores of ocr"}
    assert "none among general." in faults(checks)["scores of ocr"]


def test_a_folder_in_use_and_one_to_resume(pipeline_path: Path, tmp_path: Path) -> None:
    config = small(pipeline_path, tmp_path / "run", f"model.path={tmp_path}/absent")
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(config)
        assert "in use by process" in faults(dry_run(config, resume=True))["run folder"]
    assert "--resume" in faults(dry_run(config))["run folder"]
    (made, *_) = dry_run(config, resume=True).checks
    assert (made.fault, made.detail) == (None, f"{tmp_path / 'run'}: resume the run there")


def test_pictures_that_are_not_finite_are_a_fault(
    pipeline_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gradbalance_diffusers.rollout.sample_latents",
        lambda *a, seeds, **k: torch.full((len(seeds), 4, 8, 8), torch.nan),
    )
    assert "finite" in faults(dry_run(small(pipeline_path, tmp_path / "run")))["sampling"]
