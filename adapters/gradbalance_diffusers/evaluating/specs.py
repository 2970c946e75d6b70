"""What a user wants evaluated, as typed: ``base``, ``marble=runs/demo``, ``cfg=base@4.5``, ``org/some-lora``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradbalance.errors import InvalidArgumentError

Kind = Literal["base", "run", "checkpoint", "lora", "hub"]

_GUIDANCE = re.compile(r"(?P<what>.+)@(?P<scale>\d+(\.\d+)?)")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w./-]+\.safetensors)?")
_FORM = (
    "NAME=WHAT@GUIDANCE, where NAME= and @GUIDANCE may be left out and WHAT is `base`, the folder of a run or of a "
    "checkpoint, or a LoRA (folder, .safetensors file or hub id)"
)


@dataclass(frozen=True)
class ModelSpec:
    """A model to evaluate.

    Attributes:
        name: Its name in tables and folders.
        kind: Base model, newest checkpoint of a run, a checkpoint, a LoRA on disk, or one on the hub.
        source: Folder, file or hub id; empty for the base.
        guidance: Classifier-free guidance scale; None takes the evaluation's.
    """

    name: str
    kind: Kind
    source: str = ""
    guidance: float | None = None

    @property
    def run(self) -> Path | None:
        """The run folder that it belongs to, if that is there."""
        if self.kind == "run":
            return Path(self.source)
        above = Path(self.source).resolve().parent.parent
        return above if self.kind == "checkpoint" and (above / "config.yaml").is_file() else None


def parse_spec(text: str) -> ModelSpec:
    """Read one model as typed.

    Raises:
        InvalidArgumentError: Not of the form, a guidance below 1, or nothing of that name.

    >>> parse_spec("base")
    ModelSpec(name='base', kind='base', source='', guidance=None)
    >>> parse_spec("cfg=base@4.5")
    ModelSpec(name='cfg', kind='base', source='', guidance=4.5)
    >>> parse_spec("stabilityai/some-lora").name
    'some-lora'
    """
    name, equals, what = text.rpartition("=")
    guidance = None
    if match := _GUIDANCE.fullmatch(what):
        what, guidance = match["what"], float(match["scale"])
        if guidance < 1:
            raise InvalidArgumentError(
                f"The guidance of {text!r} must be at least 1, which is none. Found {guidance:g}."
            )
    if not what or (equals and not name):
        raise InvalidArgumentError(f"A model must be given as {_FORM}. Found {text!r}.")
    kind = _kind(what)
    name = name or _default_name(kind, what) + (f"-cfg{guidance:g}" if guidance and guidance != 1 else "")
    return ModelSpec(name, kind, "" if kind == "base" else what, guidance)


def parse_specs(texts: Sequence[str]) -> list[ModelSpec]:
    """Read several models, whose names must differ.

    Raises:
        InvalidArgumentError: As :func:`parse_spec`, or a name that stands twice.
    """
    specs = [parse_spec(text) for text in texts]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(f"The names of the models must differ. Found {twice} twice. Give names: NAME=WHAT.")
    return specs


def _kind(what: str) -> Kind:
    path = Path(what)
    if what == "base":
        return "base"
    if (path / "config.yaml").is_file():
        return "run"
    if (path / "state.json").is_file() and (path / "manifest.json").is_file():
        return "checkpoint"
    if path.is_file() or path.is_dir():
        if path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors"))):
            return "lora"
        raise InvalidArgumentError(
            f"{what!r} must be the folder of a run (with config.yaml), a checkpoint (with manifest.json), a "
            "folder with a .safetensors file, or such a file. Found none of these in it."
        )
    if _HUB.fullmatch(what):
        return "hub"
    raise InvalidArgumentError(f"A model must be given as {_FORM}. Found {what!r}, and no such folder or file.")


def _default_name(kind: Kind, what: str) -> str:
    if kind == "base":
        return "base"
    path = Path(what).resolve()
    if kind == "checkpoint":
        return f"{path.parent.parent.name}-{path.name}"
    if kind == "hub":
        return what.split("/")[1]
    return path.stem if path.is_file() else path.name
