"""The folder of a run: configuration, append-only logs, evaluations with pictures, checkpoints, report.

::

    config.yaml                      written first; its presence marks a run
    metrics.jsonl                    one row per optimizer step or evaluation; no clock times, so it is reproducible
    timings.jsonl                    seconds, apart from the metrics for that reason
    evaluations/epoch-0012.json      scores of every held-out prompt
    evaluations/epoch-0012/003.png   pictures of some of them, and grid.png with all of these
    checkpoints/step-000123/         see checkpoint.py
    report.html
    tensorboard/, wandb/             with `run.trackers`
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from torch import Tensor

from gradbalance.errors import InvalidArgumentError, StateError

from . import run_lock
from .config import Config
from .figures import image_grid, to_image
from .run_lock import RunLock

GRID_PIXELS = 128
_LOGS = ("metrics.jsonl", "timings.jsonl")
_OWN = ("config.yaml", *_LOGS, "evaluations", "checkpoints", "report.html", "tensorboard", "wandb", "wandb_id")


class RunFolder:
    """Opens the folder of a new run, or of one to resume.

    Args:
        path: The folder; made if it is missing.
        resume: Continue the run that is there.
        overwrite: Remove the run that is there. Files that a run does not write stay.

    Raises:
        InvalidArgumentError: The folder holds another run and neither is set; there is nothing to resume; both are set;
            or the folder is in use for something else.
        StateError: Another process has this run open.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, RunFolder(Path(place, "run")) as folder:
    ...     folder.log({"kind": "train", "loss": float("nan")})
    ...     print(folder.metrics_path.read_text(), end="")
    {"kind": "train", "loss": null}
    """

    def __init__(self, path: str | Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        check_run_folder(self.path, resume=resume, overwrite=overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.path)
        if overwrite:
            self._remove_run()
        self._streams: dict[str, BinaryIO] = {}

    @property
    def metrics_path(self) -> Path:
        """Rows of :meth:`log`."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_config(self, config: Config) -> None:
        """Save the whole configuration, defaults included."""
        write_whole(self.path / "config.yaml", config.to_yaml().encode())

    def read_config(self) -> Config:
        """The configuration that the run was last started with."""
        path = self.path / "config.yaml"
        return Config.from_yaml(path.read_text("utf-8"), str(path))

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl. NaN and infinities, which JSON lacks, become null."""
        self._append("metrics.jsonl", row)

    def log_timing(self, row: Mapping[str, Any]) -> None:
        """Append one row of seconds to timings.jsonl."""
        self._append("timings.jsonl", row)

    def position(self) -> dict[str, int]:
        """Length in bytes of each log, once all of it is on the disk. A checkpoint stores it."""
        for stream in self._streams.values():
            os.fsync(stream.fileno())
        return {name: path.stat().st_size if (path := self.path / name).exists() else 0 for name in _LOGS}

    def rewind(self, position: Mapping[str, int]) -> None:
        """Cut the logs back to a :meth:`position`: rows after the checkpoint will be written again.

        Raises:
            StateError: A log is shorter than that, so it is not the log of this checkpoint; nothing is cut then.
        """
        self._close_logs()
        sizes = self.position()
        for name in _LOGS:
            if sizes[name] < position[name]:
                raise StateError(
                    f"{self.path / name} must have at least the {position[name]} bytes that the checkpoint knows. "
                    f"Found {sizes[name]}. Restore the file, or start anew with --overwrite."
                )
        for name in _LOGS:
            if sizes[name] > position[name]:
                os.truncate(self.path / name, position[name])

    def save_evaluation(self, record: Mapping[str, Any], images: Mapping[int, Tensor]) -> Path:
        """Write the scores of an evaluation and the pictures of some of its prompts.

        Args:
            record: ``{"epoch": int, "prompts": [{"prompt", "source", "scores"}, ...], "grid": [indices]}``.
            images: Pictures by index of their prompt, ``[3, H, W]`` in [0, 1].

        Returns:
            The JSON file, written after the pictures.
        """
        stem = self.path / "evaluations" / f"epoch-{record['epoch']:04d}"
        stem.mkdir(parents=True, exist_ok=True)
        pictures = {index: to_image(image) for index, image in images.items()}
        for index, picture in pictures.items():
            picture.save(stem / f"{index:03d}.png")
        if pictures:
            captions = [record["prompts"][index]["prompt"] for index in pictures]
            scale = max(1, GRID_PIXELS // next(iter(pictures.values())).width)
            image_grid(list(pictures.values()), columns=8, scale=scale, captions=captions).save(stem / "grid.png")
        write_whole(stem.with_suffix(".json"), json.dumps(_finite(record), allow_nan=False).encode())
        return stem.with_suffix(".json")

    def load_evaluation(self, epoch: int) -> dict[str, Any] | None:
        """The record of an earlier evaluation, or None."""
        path = self.path / "evaluations" / f"epoch-{epoch:04d}.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def close(self) -> None:
        """Close the logs and let other processes in."""
        self._close_logs()
        self._lock.release()

    def _close_logs(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        line = json.dumps(_finite(row), allow_nan=False) + "\n"
        if name not in self._streams:
            self._streams[name] = (self.path / name).open("ab")
        self._streams[name].write(line.encode())
        self._streams[name].flush()

    def _remove_run(self) -> None:
        # The mark of a run goes last, so that an interrupted removal can be repeated.
        for name in reversed(_OWN):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def check_run_folder(path: Path, *, resume: bool = False, overwrite: bool = False) -> str:
    """Raise if :class:`RunFolder` would refuse ``path`` or cannot write there; nothing is made or changed.

    Returns:
        What a run would do with it, in words.

    Raises:
        InvalidArgumentError: As :class:`RunFolder`, or no permission to write.
        StateError: Another process has this run open.
    """
    if resume and overwrite:
        raise InvalidArgumentError("`resume` and `overwrite` exclude each other. Found both. Choose one.")
    if path.exists() and not path.is_dir():
        raise InvalidArgumentError(f"The run folder {path} must be a folder. Found a file. Choose another.")
    holds_run = (path / "config.yaml").is_file()
    if resume and not holds_run:
        raise InvalidArgumentError(
            f"The folder {path} must hold the run to resume. Found no config.yaml in it. "
            "Correct the path, or start the run without --resume."
        )
    if holds_run and not (resume or overwrite):
        raise InvalidArgumentError(
            f"The folder {path} holds another run. Continue it with --resume, replace it with --overwrite, "
            "or choose another folder with --output."
        )
    if not holds_run and path.is_dir() and any(_is_foreign(file) for file in path.rglob("*")):
        raise InvalidArgumentError(
            f"The folder {path} is not empty and holds no run. Choose another folder with --output."
        )
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    if not os.access(existing, os.W_OK):
        raise InvalidArgumentError(
            f"The run folder {path} must be writable. Found no permission to write in {existing}. "
            "Choose another folder with --output."
        )
    if user := run_lock.holder(path):
        raise run_lock.in_use(path, user)
    if holds_run:
        return f"{path}: {'resume' if resume else 'replace'} the run there"
    return f"{path}: a new run"


def _is_foreign(path: Path) -> bool:
    # A run that is killed while it writes its configuration leaves only the unfinished file and its lock.
    return path.is_file() and path.name not in (".config.yaml.partial", run_lock.NAME)


def _finite(value: Any) -> Any:
    """Nested plain values with NaN and infinities replaced by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a reader sees the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)
