"""The folder of an evaluation.

::

    prompts.jsonl                        the prompts of every model, written first
    metrics.json                         kind and options of every metric that was scored
    models/NAME/manifest.json            what the pictures were made with
    models/NAME/images/000007-1.png      picture 1 (counted from 0) of prompt 7
    models/NAME/scores/ocr.jsonl         one row per scored picture
    results.json  results.md  grid.png  report.html

Pictures and rows are added whole, so any step can be stopped at any time and started again.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradbalance.errors import InvalidArgumentError, StateError

from ..prompts import Prompt
from ..run_folder import write_whole
from ..sections import RewardConfig
from .work import Picture

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
# Where a metric is computed, how fast, and how patiently; the rest of its options say what it is.
_FREE_OPTIONS = frozenset(
    {
        "device",
        "batch_size",
        "parallel",
        "url",
        "connect_timeout",
        "timeout",
        "retries",
        "backoff",
        "deadline",
        "on_error",
        "api_key_env",
        "check",
    }
)


@dataclass(frozen=True)
class Score:
    """What a metric said of one picture.

    Attributes:
        picture: The picture.
        value: None where the metric does not apply.
    """

    picture: Picture
    value: float | None


class EvaluationFolder:
    """Reads and writes the folder of an evaluation, which may be unfinished.

    Args:
        path: The folder; it need not exist yet.

    Raises:
        InvalidArgumentError: The path is a file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgumentError(f"The evaluation folder {self.path} must be a folder. Found a file.")

    # ------------------------------------------------------------------------------------------------ prompts

    def write_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Fix the prompts of this evaluation.

        Raises:
            StateError: It has pictures of others already.
        """
        rows = [{"prompt": p.text, "source": p.source, "metadata": dict(p.metadata)} for p in prompts]
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        file = self.path / "prompts.jsonl"
        if file.is_file() and file.read_bytes() != content and self.models():
            raise StateError(
                f"{file} holds {len(self.prompts())} other prompts than the {len(prompts)} asked for: models are "
                "compared on the same prompts. Give the same prompt files and --prompts-per-source, or another "
                "--output."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)

    def prompts(self) -> list[Prompt]:
        """The prompts of this evaluation.

        Raises:
            InvalidArgumentError: The folder holds no evaluation.
        """
        file = self.path / "prompts.jsonl"
        if not file.is_file():
            raise InvalidArgumentError(
                f"The folder {self.path} must hold an evaluation. Found no prompts.jsonl in it. Generate "
                "pictures first (--only generate), or correct --output."
            )
        rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
        return [Prompt(row["prompt"], row["source"], row["metadata"]) for row in rows]

    # ------------------------------------------------------------------------------------------------- models

    def models(self) -> list[str]:
        """Names of the models that have pictures, in the order in which they were added."""
        found = [(json.loads(file.read_text("utf-8"))["number"], file.parent.name) for file in self._manifests()]
        return [name for _, name in sorted(found) if self.pictures(name)]

    def manifest(self, model: str) -> dict[str, Any]:
        """What the pictures of a model were made with.

        Raises:
            InvalidArgumentError: No such model.
        """
        file = self._model(model) / "manifest.json"
        if not file.is_file():
            raise InvalidArgumentError(
                f"The evaluation {self.path} must hold the model {model!r}. Found {self.models() or 'none'}."
            )
        manifest: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return manifest

    def add_model(self, model: str, settings: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Register a model, or check that it is the one that was registered under this name.

        Args:
            model: Its name.
            settings: Dotted key to value of everything that changes the pictures.
            notes: What else is worth keeping: paths, versions. They stay while the settings do.

        Raises:
            InvalidArgumentError: The name cannot be that of a folder.
            StateError: The model has pictures made with other settings; the differing ones are named.
        """
        if not _NAME.fullmatch(model):
            raise InvalidArgumentError(
                f"The name of a model must be letters, digits and . _ @ - only. Found {model!r}. Give it one: NAME=..."
            )
        settings = json.loads(json.dumps(dict(settings)))
        file = self._model(model) / "manifest.json"
        number = len(self._manifests())
        if file.is_file():
            known, number = self.manifest(model)["settings"], self.manifest(model)["number"]
            keys = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
            if not keys:
                return
            if self.pictures(model):
                listing = "; ".join(f"{key}: {known.get(key)!r} there, {settings.get(key)!r} now" for key in keys)
                raise StateError(
                    f"The pictures of {model!r} in {file.parent} were made with other settings ({listing}). Repeat the "
                    f"settings, choose another name or --output, or remove {file.parent}."
                )
        record = {"number": number, "settings": settings, "notes": dict(notes)}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(record, indent=1, ensure_ascii=False).encode())

    # ------------------------------------------------------------------------------------------------ pictures

    def image_path(self, model: str, picture: Picture) -> Path:
        """Where a picture is, or will be."""
        return self._model(model) / "images" / picture.file_name

    def save_image(self, model: str, picture: Picture, png: bytes) -> None:
        """Write a picture whole; one that is there stays."""
        path = self.image_path(model, picture)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, png)

    def pictures(self, model: str) -> set[Picture]:
        """The pictures that a model has."""
        names = (path.stem.split("-") for path in (self._model(model) / "images").glob("[0-9]*-*.png"))
        return {Picture(int(prompt), int(sample)) for prompt, sample in names}

    # -------------------------------------------------------------------------------------------------- scores

    def add_metrics(self, metrics: Sequence[RewardConfig]) -> None:
        """Register metrics, or check that they are those registered under their names.

        Raises:
            InvalidArgumentError: A name cannot be that of a file.
            StateError: A name stands for another metric here, which has scored pictures.
        """
        known = self.metrics()
        for metric in metrics:
            if not _NAME.fullmatch(metric.name):
                raise InvalidArgumentError(
                    f"The name of a metric must be letters, digits and . _ @ - only. Found {metric.name!r}. Give "
                    "it one: {name: ..., kind: " + metric.scorer + "}."
                )
            record = {"kind": metric.scorer, "options": metric.options}
            before = known.get(metric.name, record)
            if not list(self.path.glob(f"models/*/scores/{metric.name}.jsonl")):
                known[metric.name] = record
            elif _essence(before) != _essence(record):
                raise StateError(
                    f"The metric {metric.name!r} of {self.path} is {_essence(before)}, not {_essence(record)}. Give "
                    f"the other one a name of its own, or remove models/*/scores/{metric.name}.jsonl."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "metrics.json", json.dumps(known, indent=1).encode())

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Kind and options of every registered metric, by name."""
        file = self.path / "metrics.json"
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}

    def scores(self, model: str, metric: str) -> list[Score]:
        """The scores that were written, without a last row that was cut off."""
        file = self._score_file(model, metric)
        if not file.is_file():
            return []
        rows = [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]
        return [Score(Picture(row["prompt"], row["sample"]), row["score"]) for row in rows]

    def append_scores(self, model: str, metric: str, scores: Iterable[Score]) -> None:
        """Add rows; NaN becomes null. A row cut off by an interruption is removed first."""
        file = self._score_file(model, metric)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            content = file.read_bytes()
            os.truncate(file, content.rfind(b"\n") + 1)
        with file.open("ab") as stream:
            for score in scores:
                value = None if score.value is None or not math.isfinite(score.value) else score.value
                row = {**asdict(score.picture), "score": value}
                stream.write(json.dumps(row).encode() + b"\n")

    # ------------------------------------------------------------------------------------------------- places

    def _model(self, model: str) -> Path:
        return self.path / "models" / model

    def _manifests(self) -> list[Path]:
        return sorted(self.path.glob("models/*/manifest.json"))

    def _score_file(self, model: str, metric: str) -> Path:
        return self._model(model) / "scores" / f"{metric}.jsonl"


def _essence(metric: Mapping[str, Any]) -> str:
    """What a metric is, without what only says where it runs."""
    options = {key: value for key, value in metric["options"].items() if key not in _FREE_OPTIONS}
    return f"{metric['kind']} {json.dumps(options, sort_keys=True)}"
