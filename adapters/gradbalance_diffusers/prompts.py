"""Prompts and where they come from: text files, JSON lines, or the packaged tiny task."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradbalance.errors import InvalidArgumentError

from .prompt_sampler import StratifiedSampler
from .tiny.prompts import tiny_prompts

__all__ = ["Prompt", "StratifiedSampler", "load_prompts", "load_sources"]

PACKAGED = "tiny"


@dataclass(frozen=True)
class Prompt:
    """A text with what rewards need to know about it.

    Attributes:
        text: What the model reads.
        source: ``"general"``, ``"ocr"`` or ``"geneval"``.
        metadata: Keyword arguments for rewards, such as GenEval's ``tag`` and ``include``. It takes part in ``==`` but
            not in the hash, so prompts can be dictionary keys.
    """

    text: str
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


def load_prompts(path: str | Path, source: str) -> list[Prompt]:
    r"""Prompts of one file.

    Args:
        path: ``.txt`` with one prompt a line, or ``.jsonl`` with one object a line: its ``"prompt"`` is the text,
            everything else becomes metadata. GenEval's and DiffusionNFT's prompt files are read as they are.
        source: ``"general"``; ``"ocr"``, whose prompts hold the text to draw between double quotes; or ``"geneval"``,
            whose rows have an ``include`` list of ``{"class": str, "count": int, ...}``.

    Returns:
        The prompts in the order of the file, repeated ones included. Blank lines are left out and counted in a warning.

    Raises:
        InvalidArgumentError: No such file, no prompt in it, or a line that breaks a rule; with file and line number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "signs.txt")
    ...     _ = path.write_text('a sign that says "OPEN"\n')
    ...     load_prompts(path, "ocr")
    [Prompt(text='a sign that says "OPEN"', source='ocr', metadata={})]
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        raise InvalidArgumentError(
            f"A prompt file must be an existing .txt or .jsonl file. Found '{path}' for the source {source!r}."
        )
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path}: a prompt file must be UTF-8. Found {error}. Save it as UTF-8.") from error
    if not lines[-1].strip():
        lines.pop()  # what follows the last line break
    prompts, blank = [], 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            blank += 1
            continue
        place = f"{path}, line {number}"
        row = _json_row(line, place) if path.suffix == ".jsonl" else {"prompt": line.strip()}
        prompts.append(_prompt(row, source, place))
    if not prompts:
        raise InvalidArgumentError(f"{path}: a prompt file must hold at least one prompt. Found none.")
    if blank:
        warnings.warn(f"{path}: left out {blank} blank lines of {len(lines)}.", UserWarning, stacklevel=2)
    return prompts


def load_sources(
    sources: Mapping[str, str],
    split: Literal["train", "test"],
    *,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, list[Prompt]]:
    """Prompts of every source of a configuration.

    Args:
        sources: Per source a file, or ``"tiny"`` for the packaged prompts.
        split: Which half of the packaged prompts; files are what their names say.
        limit: At most this many prompts per source, the first ones.
        seed: Order of the packaged prompts.

    >>> sources = load_sources({"ocr": "tiny", "general": "tiny"}, "test", limit=2)
    >>> [(name, len(prompts)) for name, prompts in sources.items()]
    [('ocr', 2), ('general', 2)]
    """
    loaded = {}
    for source, place in sources.items():
        if place == PACKAGED:
            rows = tiny_prompts(split, source, seed=seed)  # type: ignore[arg-type]  # checked there
            loaded[source] = [_prompt(row, source, f"packaged prompt {i}") for i, row in enumerate(rows)][:limit]
        else:
            loaded[source] = load_prompts(place, source)[:limit]
    return loaded


def _json_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(
            f"{place}: not valid JSON: {error.msg} at column {error.colno}. Correct the line or remove it."
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise InvalidArgumentError(
            f'{place}: a row must be an object with a non-empty text "prompt". Found {line.strip()[:80]!r}.'
        )
    return row


def _prompt(row: dict[str, Any], source: str, place: str) -> Prompt:
    if source not in _RULES:
        raise InvalidArgumentError(f"`source` must be one of {', '.join(_RULES)}. Found {source!r}.")
    if row.get("source", source) != source:
        raise InvalidArgumentError(
            f"{place}: the row belongs to the source {row['source']!r}, but the file is listed as {source!r}. "
            "Split the file by source."
        )
    _RULES[source](row, place)
    return Prompt(row["prompt"], source, {key: value for key, value in row.items() if key not in ("prompt", "source")})


def _check_nothing(row: dict[str, Any], place: str) -> None:
    """General prompts have no rule of their own."""


def _check_ocr(row: dict[str, Any], place: str) -> None:
    quoted = re.search(r'"([^"]*)"', row["prompt"])
    if quoted is None or not quoted[1].strip():
        raise InvalidArgumentError(
            f"{place}: an OCR prompt must hold the text to draw between double quotes. Found {row['prompt']!r}."
        )


def _check_geneval(row: dict[str, Any], place: str) -> None:
    include = row.get("include")
    if not isinstance(include, list) or not include or not all(_is_object(entry) for entry in include):
        raise InvalidArgumentError(
            f'{place}: a GenEval prompt must have "include", a list of {{"class": text, "count": number >= 1}}. '
            f"Found {include!r}."
        )


def _is_object(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("class"), str):
        return False
    count = entry.get("count")
    return type(count) is int and count >= 1


_RULES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "general": _check_nothing,
    "ocr": _check_ocr,
    "geneval": _check_geneval,
}
