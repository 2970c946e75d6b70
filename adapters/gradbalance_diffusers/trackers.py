"""Rows of metrics.jsonl to TensorBoard and Weights & Biases as well, through the trackers of accelerate."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gradbalance.errors import MissingDependencyError

from .config import Config

PROJECT = "gradbalance"
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
_WANDB_ID = "wandb_id"


class Trackers:
    """Sends every number of a row under its path in metrics.jsonl, behind the kind of row: ``train/rewards/ocr``.

    metrics.jsonl stays the record: a resumed run cuts it back to the checkpoint, and so does TensorBoard; Weights &
    Biases continues the same run and keeps what it was sent first for a step.

    Args:
        names: Any of ``"tensorboard"`` (to the folder's own ``tensorboard``) and ``"wandb"``.
        folder: The folder of the run.
        config: Stored beside the metrics by Weights & Biases.
        step: Optimizer steps done; later ones in TensorBoard's files are of a run that was cut back.

    Raises:
        MissingDependencyError: The package of a tracker is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Config, step: int) -> None:
        self._trackers = []
        for name in names:
            require_tracker(name)
            make = {"tensorboard": _tensorboard, "wandb": _wandb}[name]
            self._trackers.append(make(folder, config, step))

    def log(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of one row of metrics.jsonl."""
        for tracker in self._trackers:
            tracker.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        """Finish all of them."""
        for tracker in self._trackers:
            tracker.finish()


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Finite numbers of a row with their path; texts, lists and missing values are left to metrics.jsonl.

    >>> dict(scalars({"kind": "train", "step": 3, "rewards": {"ocr": 0.5, "geneval": None}, "refreshed": True}))
    {'train/step': 3.0, 'train/rewards/ocr': 0.5, 'train/refreshed': 1.0}
    """

    def walk(value: Any, path: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(item, f"{path}/{key}")
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            yield path, float(value)

    for key, item in row.items():
        yield from walk(item, f"{row['kind']}/{key}")


def require_tracker(name: str) -> None:
    """Raise unless the package of a tracker can be imported.

    Raises:
        MissingDependencyError: With the command that installs it.
    """
    try:
        import_module(_PACKAGES[name])
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"`run.trackers` names {name!r}, which needs the package {error.name!r}: pip install {_PACKAGES[name]}"
        ) from error


def _tensorboard(folder: Path, config: Config, step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("tensorboard", folder, purge_step=step + 1 if step else None)
    return _started(tracker)


def _wandb(folder: Path, config: Config, step: int) -> Any:
    from accelerate.tracking import WandBTracker

    stored = folder / _WANDB_ID
    if not stored.exists():
        stored.write_text(uuid.uuid4().hex)
    tracker = WandBTracker(PROJECT, name=folder.name, id=stored.read_text(), resume="allow", dir=str(folder))
    _started(tracker)
    tracker.store_init_configuration(config.frozen_values())
    return tracker


def _started(tracker: Any) -> Any:
    if hasattr(tracker, "start"):  # older releases of accelerate start a tracker when it is made
        tracker.start()
    return tracker
