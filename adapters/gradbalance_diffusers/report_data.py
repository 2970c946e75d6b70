"""What a report tells, read from the folder of a run: series, summaries and counts, without any layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradbalance.errors import InvalidArgumentError

from .charts import Point
from .config import Config

Row = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """A run as far as it has come.

    Attributes:
        path: Its folder.
        config: Its configuration.
        train: Rows of the optimizer steps.
        evaluations: Rows of the evaluations on held-out prompts.
        seconds: Time spent, as logged; None without timings.
    """

    path: Path
    config: Config
    train: list[Row]
    evaluations: list[Row]
    seconds: float | None

    @cached_property
    def rewards(self) -> list[str]:
        """Names of the rewards, in the order of the configuration."""
        return self.config.reward_names

    @cached_property
    def objectives(self) -> list[str]:
        """Names of what was balanced: rewards, or ``sum`` for the scalar baseline."""
        names = dict.fromkeys(name for row in self.train for name in row.get("weights") or {})
        return [*(n for n in self.rewards if n in names), *(n for n in names if n not in self.rewards)]

    @cached_property
    def epochs_done(self) -> int:
        """Epochs trained so far."""
        return max((row["epoch"] + 1 for row in self.train), default=0)

    @cached_property
    def refreshes(self) -> list[Row]:
        """The steps on which per-reward gradients were collected."""
        return [row for row in self.train if row.get("cosines")]

    @cached_property
    def measured(self) -> Row | None:
        """The last optimizer step that tells what a conflict meter had found; None without one."""
        return next((row for row in reversed(self.train) if row.get("expected")), None)

    @cached_property
    def stage_marks(self) -> list[tuple[float, str]]:
        """First step and name of every stage, if there is more than one."""
        first: dict[str, float] = {}
        for row in self.train:
            first.setdefault(row["stage"], row["step"])
        return [(step, name) for name, step in first.items()] if len(first) > 1 else []

    def series(self, value: Callable[[Row], float | None]) -> list[Point]:
        """(step, value) of every optimizer step."""
        return [(row["step"], value(row)) for row in self.train]

    def named(self, field: str, name: str) -> list[Point]:
        """(step, value) of one entry of a mapping, on the steps whose row has that mapping."""
        return [(row["step"], row[field].get(name)) for row in self.train if row.get(field)]

    def mean_conflict(self, a: str, b: str) -> float | None:
        """Mean cosine between the gradients of two rewards over the refreshes that know it."""
        keys = (f"{a}|{b}", f"{b}|{a}")
        values = [v for row in self.train for k in keys if (v := (row.get("conflicts") or {}).get(k)) is not None]
        return sum(values) / len(values) if values else None

    def count(self, field: str, name: str) -> int:
        """Sum over epochs of one entry of a mapping of counts; every step of an epoch repeats those of its samples."""
        epochs = {row["epoch"]: row for row in self.train}
        return sum((row.get(field) or {}).get(name, 0) for row in epochs.values())

    def scores(self, row: Row) -> Row | None:
        """Per-prompt scores of an evaluation, or None if its file is gone."""
        path = self.path / "evaluations" / f"epoch-{row['epoch']:04d}.json"
        return json.loads(path.read_text("utf-8")) if path.is_file() else None


def read_run(path: str | Path) -> RunData:
    """Read the logs of a run, which may still be going on.

    Raises:
        InvalidArgumentError: The folder holds no run.
    """
    path = Path(path)
    if not (path / "config.yaml").is_file():
        raise InvalidArgumentError(f"`path` must be the folder of a run. Found no config.yaml in {path}.")
    config = Config.from_yaml((path / "config.yaml").read_text("utf-8"), str(path / "config.yaml"))
    rows = _rows(path / "metrics.jsonl")
    timings = [v for row in _rows(path / "timings.jsonl") for k, v in row.items() if k != "epoch" and v is not None]
    return RunData(
        path=path,
        config=config,
        train=[row for row in rows if row["kind"] == "train"],
        evaluations=[row for row in rows if row["kind"] == "eval"],
        seconds=sum(timings) if timings else None,
    )


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean over the ``window`` nearest known values, centred; the window narrows at both ends.

    >>> running_mean([(0, 0.0), (1, 3.0), (2, None), (3, 6.0)], 3)
    [(0, 0.0), (1, 3.0), (3, 6.0)]
    """
    known = [(x, y) for x, y in points if y is not None]
    smooth: list[Point] = []
    for i, (x, _) in enumerate(known):
        half = min(window // 2, i, len(known) - 1 - i)
        near = [y for _, y in known[i - half : i + half + 1]]
        smooth.append((x, math.fsum(near) / len(near)))
    return smooth


def thinned(points: Sequence[Point], most: int = 400) -> list[Point]:
    """Every n-th point, so that at most about ``most`` are left; the last one always stays."""
    stride = -(-len(points) // most) or 1
    return list(points[::-stride][::-1])


def _rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file. What follows the last line break is a row that is being written, and left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
