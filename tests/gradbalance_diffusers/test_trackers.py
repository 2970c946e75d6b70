"""Metrics in TensorBoard's files and at a stand-in for Weights & Biases."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gradbalance as gb
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.trackers import Trackers, scalars
from small_run import Make, rows

TENSORBOARD = ("run.trackers=[tensorboard]", "run.epochs=2", "evaluation.every=2", "run.checkpoint_every=1")


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


# protobuf's C extension, loaded by tensorboard, uses what Python 3.14 will remove.
@pytest.mark.filterwarnings("ignore:Type google.*uses PyType_Spec with a metaclass:DeprecationWarning")
def test_tensorboard_has_every_number_of_the_metrics_and_continues(make: Make) -> None:
    first = make("run", *TENSORBOARD)
    first.fit()
    resumed = make("run", *TENSORBOARD, "run.epochs=3", resume=True)
    resumed.resume()
    resumed.fit()
    found = events(resumed.folder.path)
    for kind in ("train", "eval"):
        for row in rows(resumed, kind):
            for name, value in scalars(row):
                values = [v for step, v in found[name] if step == row["step"]]
                assert values, name
                assert values[-1] == pytest.approx(value, rel=1e-6)
    assert [step for step, _ in found["train/rewards/contrast"]] == [1, 2, 3]


def test_only_finite_numbers_are_sent() -> None:
    row = {"kind": "eval", "step": 1, "change": None, "a": [1], "b": "x", "c": math.nan, "d": {"e": math.inf, "f": 2}}
    assert dict(scalars(row)) == {"eval/step": 1.0, "eval/d/f": 2.0}


class FakeWandb(ModuleType):
    """What accelerate's tracker uses of wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.config = self

    def init(self, **arguments: Any) -> FakeWandb:
        self.calls.append(arguments)
        return self

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.stored = values

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_the_same_numbers_and_a_resumed_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, config = FakeWandb(), load_config("tiny", ["run.trackers=[wandb]"])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 5):
        trackers = Trackers(config.run.trackers, tmp_path, config, step)
        trackers.log({"kind": "train", "step": step + 1, "rewards": {"ocr": 0.25}})
        trackers.close()
    assert fake.rows == [(step, {"train/step": float(step), "train/rewards/ocr": 0.25}) for step in (1, 6)]
    one, two = fake.calls
    assert one["id"] == two["id"]
    assert (one["resume"], one["name"], one["project"]) == ("allow", tmp_path.name, "gradbalance")
    assert (fake.finished, fake.stored["optimizer.lr"]) == (2, config.optimizer.lr)


def test_a_missing_package_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = load_config("tiny", ["run.trackers=[wandb]"])
    with pytest.raises(gb.MissingDependencyError, match=r"'wandb'.*pip install wandb"):
        Trackers(config.run.trackers, tmp_path, config, 0)


def test_trackers_are_closed_when_a_run_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trainer = make("run", "run.trackers=[wandb]")
    monkeypatch.setattr(trainer, "evaluate", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert fake.finished == 1
