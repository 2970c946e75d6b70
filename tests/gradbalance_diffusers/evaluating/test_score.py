from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.evaluating.folder import EvaluationFolder
from gradbalance_diffusers.evaluating.score import read_picture, score
from gradbalance_diffusers.evaluating.work import Picture
from gradbalance_diffusers.prompts import Prompt
from gradbalance_diffusers.rewards import make_reward
from gradbalance_diffusers.rewards.scores import LostScore
from gradbalance_diffusers.sections import RewardConfig

Metric = Callable[..., RewardConfig]


@pytest.fixture
def folder(scored: Callable[..., EvaluationFolder], prompts: list[Prompt]) -> EvaluationFolder:
    """Two models with two pictures of each of three prompts, and one score each."""
    pictures = {(prompt, sample): 0.0 for prompt in range(3) for sample in range(2)}
    return scored(prompts, {"a": {"old": pictures}, "b": {"old": pictures}})


def files(folder: EvaluationFolder) -> dict[str, bytes]:
    return {f"{path.parent.parent.name}/{path.name}": path.read_bytes() for path in folder.path.rglob("*.jsonl")}


def test_scores_are_those_of_the_reward_on_the_saved_pictures(folder: EvaluationFolder, prompts: list[Prompt]) -> None:
    score(folder, [RewardConfig(name="compressible", kind="jpeg_compressibility")])
    found = folder.scores("b", "compressible")
    assert [s.picture for s in found] == [Picture(p, s) for s in range(2) for p in range(3)]
    reward = make_reward("jpeg_compressibility")
    for s in found:
        image = read_picture(folder, "b", s.picture)
        assert torch.equal(
            image, torch.tensor(np.array(Image.open(folder.image_path("b", s.picture)))).permute(2, 0, 1) / 255
        )
        assert s.value == pytest.approx(float(reward(image[None], [prompts[s.picture.prompt].text])[0]))


def test_a_metric_added_later_scores_alone(folder: EvaluationFolder, metric: Metric, recorded: type) -> None:
    assert score(folder, [metric("bright")], ["a"], batch_size=4) == {}
    assert recorded.calls == [["a cat", 'a sign "42"', "two dogs"]] * 2
    assert score(folder, [metric("bright"), metric("again")], batch_size=4) == {}
    assert len(recorded.calls) == 2 + 2 + 4
    assert score(folder, [metric("bright"), metric("again")]) == {}
    assert len(recorded.calls) == 8
    assert folder.scores("a", "bright") == folder.scores("a", "again")
    values = [s.value for s in folder.scores("a", "bright")]
    assert [value is None for value in values] == [False, True, False] * 2


def test_interrupted_and_continued_gives_the_same_bytes(
    folder: EvaluationFolder, metric: Metric, recorded: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(folder, [metric("bright")], batch_size=2)
    whole = files(folder)
    (cut, gone) = (folder.path / "models" / name / "scores" / "bright.jsonl" for name in "ab")
    cut.unlink()
    gone.unlink()
    monkeypatch.setattr(recorded, "limit", len(recorded.calls) + 3)
    problem = score(folder, [metric("bright")], batch_size=2)["bright"]
    assert problem.startswith("RewardError: Reward 'bright' raised RuntimeError: no more than this, on batch 3")
    assert len(cut.read_text().splitlines()) == 5
    cut.write_bytes(cut.read_bytes()[:-9])  # killed in the middle of a row
    monkeypatch.setattr(recorded, "limit", float("inf"))
    score(folder, [metric("bright")], batch_size=2)
    assert files(folder) == whole


def test_new_pictures_are_scored_and_old_ones_are_not(folder: EvaluationFolder, metric: Metric, recorded: type) -> None:
    score(folder, [metric("bright")], ["a"])
    before = folder.scores("a", "bright")
    recorded.calls.clear()
    source = folder.image_path("a", Picture(0, 0)).read_bytes()
    for prompt in range(3):
        folder.save_image("a", Picture(prompt, 2), source)
    score(folder, [metric("bright")], ["a"])
    assert len(recorded.calls) == 1
    assert folder.scores("a", "bright")[: len(before)] == before
    assert len(folder.scores("a", "bright")) == 9


def test_one_metric_is_freed_before_the_next_is_made(folder: EvaluationFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref] = []

    class Large:
        def __init__(self, name: str = "") -> None:
            assert not [ref for ref in alive if ref() is not None]
            alive.append(weakref.ref(self))

        def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: object) -> list[float]:
            return [0.0] * len(prompts)

    module = ModuleType("large_metrics")
    module.Large = Large
    monkeypatch.setitem(sys.modules, "large_metrics", module)
    score(folder, [RewardConfig(name=name, kind="large_metrics:Large") for name in ("one", "two")])
    gc.collect()
    assert len(alive) == 2


def test_lost_scores_are_counted_and_asked_for_again(folder: EvaluationFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky:
        lose = True

        def __init__(self, name: str = "") -> None:
            self.name = name

        def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: object) -> list[object]:
            lost = LostScore("the server was away") if Flaky.lose else 2.0
            return [lost, None, 1.0]

    module = ModuleType("flaky_metric")
    module.Flaky = Flaky
    monkeypatch.setitem(sys.modules, "flaky_metric", module)
    metric = RewardConfig(name="flaky", kind="flaky_metric:Flaky")
    with pytest.warns(RuntimeWarning, match="the server was away"):
        assert score(folder, [metric], ["a"]) == {"flaky": "2 scores were lost."}
    assert [(s.picture.prompt, s.value) for s in folder.scores("a", "flaky")] == [(1, None), (2, 1.0)] * 2
    Flaky.lose = False
    assert score(folder, [metric], ["a"]) == {}
    found = {s.picture: s.value for s in folder.scores("a", "flaky")}
    assert found == {Picture(p, s): (2.0, None, 1.0)[p] for p in range(3) for s in range(2)}


def test_without_pictures_there_is_nothing_to_score(tmp_path: Path, prompts: list[Prompt], metric: Metric) -> None:
    folder = EvaluationFolder(tmp_path / "empty")
    with pytest.raises(InvalidArgumentError, match=r"prompts\.jsonl"):
        score(folder, [metric("bright")])
    folder.write_prompts(prompts)
    with pytest.raises(InvalidArgumentError, match="must hold pictures"):
        score(folder, [metric("bright")])


def test_a_metric_that_cannot_be_made_does_not_keep_others_from_scoring(
    folder: EvaluationFolder, metric: Metric, recorded: type
) -> None:
    broken = RewardConfig(name="broken", kind="fractions:Fraction", options={"numerator": 1, "denominator": 0})
    problems = score(folder, [RewardConfig(name="pickscor"), broken, metric("bright")])
    assert list(problems) == ["pickscor", "broken"]
    assert "InvalidArgumentError" in problems["pickscor"]
    assert "ZeroDivisionError" in problems["broken"]
    assert "Did you mean 'pickscore'" in problems["pickscor"]
    assert len(folder.scores("b", "bright")) == 6


def test_an_unknown_model_is_refused(folder: EvaluationFolder) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must hold the model 'c'. Found \['a', 'b'\]"):
        score(folder, [RewardConfig(name="ocr")], ["c"])
