from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers.evaluating.folder import EvaluationFolder, Score
from gradbalance_diffusers.evaluating.work import Picture
from gradbalance_diffusers.prompts import Prompt
from gradbalance_diffusers.sections import RewardConfig


@pytest.fixture
def folder(tmp_path: Path, prompts: list[Prompt]) -> EvaluationFolder:
    folder = EvaluationFolder(tmp_path / "evaluation")
    folder.write_prompts(prompts)
    return folder


def test_prompts_come_back_and_are_fixed(folder: EvaluationFolder, prompts: list[Prompt]) -> None:
    assert folder.prompts() == prompts
    folder.write_prompts(prompts[:1])
    folder.write_prompts(prompts)  # nothing was made of the others yet
    folder.add_model("a", {}, {})
    folder.save_image("a", Picture(0, 0), b"")
    folder.write_prompts(prompts)
    with pytest.raises(StateError, match="3 other prompts than the 2 asked for"):
        folder.write_prompts(prompts[:2])
    assert folder.prompts() == prompts


def test_models_keep_their_order_and_their_settings(folder: EvaluationFolder) -> None:
    folder.add_model("zebra", {"steps": 9}, {"path": "mistaken"})
    folder.add_model("zebra", {"steps": 4, "size": (1, 2)}, {"path": "a"})  # there are no pictures of the first yet
    folder.add_model("ant", {"steps": 4}, {})
    assert folder.models() == []
    for name in ("ant", "zebra"):
        folder.save_image(name, Picture(0, 0), b"")
    assert folder.models() == ["zebra", "ant"]
    folder.add_model("zebra", {"steps": 4, "size": (1, 2)}, {"path": "moved"})
    assert folder.manifest("zebra")["notes"] == {"path": "a"}
    with pytest.raises(StateError, match="steps: 4 there, 5 now; seed: None there, 1 now"):
        folder.add_model("ant", {"steps": 5, "seed": 1}, {})
    with pytest.raises(InvalidArgumentError, match=r"must hold the model 'bee'. Found \['zebra', 'ant'\]"):
        folder.manifest("bee")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_names_must_be_those_of_files(folder: EvaluationFolder, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="letters, digits"):
        folder.add_model(name, {}, {})
    with pytest.raises(InvalidArgumentError, match="letters, digits"):
        folder.add_metrics([RewardConfig(name=name)])


def test_a_row_that_was_cut_off_is_replaced(folder: EvaluationFolder) -> None:
    scores = [Score(Picture(0, 0), 0.1 + 0.2), Score(Picture(1, 0), None), Score(Picture(2, 0), float("nan"))]
    folder.append_scores("a", "ocr", scores[:2])
    file = folder.path / "models" / "a" / "scores" / "ocr.jsonl"
    with file.open("a") as stream:
        stream.write('{"prompt": 2, "sam')
    assert folder.scores("a", "ocr") == scores[:2]
    folder.append_scores("a", "ocr", scores[2:])
    assert folder.scores("a", "ocr") == [*scores[:2], Score(Picture(2, 0), None)]
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()] == [0, 1, 2]


def test_a_picture_that_is_there_stays(folder: EvaluationFolder) -> None:
    folder.save_image("a", Picture(7, 1), b"first")
    folder.save_image("a", Picture(7, 1), b"second")
    assert folder.image_path("a", Picture(7, 1)).read_bytes() == b"first"
    folder.image_path("a", Picture(8, 1)).with_name(".000008-1.png.partial").write_bytes(b"cut off")
    assert folder.pictures("a") == {Picture(7, 1)}


def test_a_metric_may_move_to_another_device_but_not_change(
    folder: EvaluationFolder, metric: Callable[..., RewardConfig]
) -> None:
    folder.add_metrics([metric("bright", path="mistaken")])
    folder.add_metrics([metric("bright", device="cpu")])  # the first has not scored anything
    folder.append_scores("a", "bright", [Score(Picture(0, 0), 1.0)])
    folder.add_metrics([metric("bright", device="cuda:1", batch_size=4), metric("other")])
    assert list(folder.metrics()) == ["bright", "other"]
    with pytest.raises(StateError, match=r"'bright' of .* is recorded_metric:Recorded \{\}, not .*\{\"path\": \"x\"\}"):
        folder.add_metrics([metric("bright", path="x")])


def test_a_folder_without_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no prompts\.jsonl"):
        EvaluationFolder(tmp_path).prompts()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="Found a file"):
        EvaluationFolder(tmp_path / "file")
