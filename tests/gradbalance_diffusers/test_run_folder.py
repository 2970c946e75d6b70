import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers import run_lock
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.figures import image_grid, to_image
from gradbalance_diffusers.run_folder import RunFolder


def start(path, **kwargs):
    folder = RunFolder(path, **kwargs)
    folder.write_config(load_config("tiny"))
    return folder


def test_a_folder_with_a_run_is_refused_unless_told_what_to_do(tmp_path):
    start(tmp_path / "run").close()
    with pytest.raises(InvalidArgumentError) as caught:
        RunFolder(tmp_path / "run")
    assert "--resume" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="exclude each other"):
        RunFolder(tmp_path / "run", resume=True, overwrite=True)
    assert RunFolder(tmp_path / "run", resume=True).read_config() == load_config("tiny")


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    with start(tmp_path) as folder:
        folder.log({"a": 1})
        folder.checkpoints.mkdir()
        (folder.path / "notes.txt").write_text("mine")
    RunFolder(tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_overwrite_and_start_need_no_existing_folder(tmp_path):
    RunFolder(tmp_path / "a" / "b", overwrite=True)
    assert (tmp_path / "a" / "b").is_dir()
    RunFolder(tmp_path / "a" / "b")


def test_a_start_that_was_killed_at_once_can_be_repeated(tmp_path):
    (tmp_path / ".config.yaml.partial").write_text("mod")
    start(tmp_path).close()
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


HOLD = """
import sys, time
from gradbalance_diffusers.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_is_held_by_one_process_until_it_ends_however_it_ends(tmp_path):
    path = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(StateError, match=rf"in use by process {other.pid} on .*--output"):
            RunFolder(path)
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert (path / ".lock").exists(), "left behind, and of no meaning"
    with start(path) as folder, pytest.raises(StateError, match=f"process {os.getpid()}"):
        RunFolder(folder.path, resume=True)
    assert not (path / ".lock").exists()
    with pytest.raises(StateError, match="in use"), RunFolder(path, resume=True):
        RunFolder(path, overwrite=True)
    assert (path / "config.yaml").exists(), "a refused process removes nothing"


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="cannot lock files"):
        start(tmp_path / "run").close()


def test_foreign_folders_and_files_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(InvalidArgumentError, match="holds no run"):
            RunFolder(tmp_path, overwrite=overwrite)
    with pytest.raises(InvalidArgumentError, match="Found a file"):
        RunFolder(tmp_path / "thesis.tex")
    with pytest.raises(InvalidArgumentError, match=r"no config\.yaml"):
        RunFolder(tmp_path, resume=True)


def test_rows_are_strict_json_and_on_the_disk_at_once(tmp_path):
    with start(tmp_path) as folder:
        folder.log({"x": float("nan"), "y": [1.5, float("-inf")], "z": {"w": None, "v": True}})
        folder.log_timing({"seconds": 0.5})
        assert folder.metrics_path.read_text() == '{"x": null, "y": [1.5, null], "z": {"w": null, "v": true}}\n'
        assert (tmp_path / "timings.jsonl").read_text() == '{"seconds": 0.5}\n'
        with pytest.raises(TypeError, match="Tensor"):
            folder.log({"x": torch.ones(1)})
        assert folder.metrics_path.read_text().count("\n") == 1


def test_resume_rewinds_the_logs_to_the_checkpoint(tmp_path):
    with start(tmp_path) as folder:
        assert folder.position() == {"metrics.jsonl": 0, "timings.jsonl": 0}
        folder.log({"step": 1})
        folder.log_timing({"s": 1})
        position = folder.position()
        folder.log({"step": 2})
        folder.log_timing({"s": 2})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "los')  # killed while writing
    with RunFolder(tmp_path, resume=True) as folder:
        folder.rewind(position)
        folder.log({"step": 2})
        assert folder.metrics_path.read_text() == '{"step": 1}\n{"step": 2}\n'
        assert (tmp_path / "timings.jsonl").read_text() == '{"s": 1}\n'
        folder.rewind({"metrics.jsonl": 0, "timings.jsonl": 0})
        assert folder.position() == {"metrics.jsonl": 0, "timings.jsonl": 0}
    with pytest.raises(StateError, match=r"metrics\.jsonl must have at least the"):
        folder.rewind(position)


def test_evaluations_and_their_pictures(tmp_path):
    record = {"epoch": 12, "prompts": [{"prompt": "p", "source": "ocr", "scores": {"ocr": float("nan")}}], "grid": [0]}
    picture = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0))
    with start(tmp_path) as folder:
        assert folder.load_evaluation(12) is None
        path = folder.save_evaluation(record, {0: picture})
        assert path == tmp_path / "evaluations" / "epoch-0012.json"
        assert folder.load_evaluation(12)["prompts"][0]["scores"] == {"ocr": None}
        assert json.loads(path.read_text())["grid"] == [0]
    with Image.open(tmp_path / "evaluations" / "epoch-0012" / "000.png") as saved:
        assert saved.size == (6, 4)
        assert saved.getpixel((5, 0)) == tuple(round(255 * v) for v in picture[:, 0, 5].tolist())


def test_image_grid_places_enlarged_pictures_and_captions():
    colors = ["red", "lime", "blue"]
    grid = image_grid([Image.new("RGB", (8, 8), c) for c in colors], 2, 4, ["a", "a very long caption", ""])
    assert grid.size == (80, 112)
    assert [grid.getpixel(xy) for xy in ((5, 5), (75, 5), (5, 61))] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert {grid.getpixel((x, 44)) for x in range(80)} != {(255, 255, 255)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 2), "one or more"),
        (([Image.new("RGB", (2, 2)), Image.new("RGB", (3, 2))], 2), "one size"),
        (([Image.new("RGB", (2, 2))], 0), "at least 1"),
        (([Image.new("RGB", (2, 2))], 1, 1, ["a", "b"]), "one per picture"),
    ],
)
def test_image_grid_refuses_what_it_cannot_place(arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        image_grid(*arguments)


def test_to_image_refuses_other_shapes():
    with pytest.raises(InvalidArgumentError, match=r"\[3, H, W\]"):
        to_image(torch.zeros(1, 3, 4, 4))
