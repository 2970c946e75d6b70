"""Prompts and where they come from: text files, JSON lines, the packaged examples, or the packaged tiny task."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from gradbalance.errors import InvalidArgumentError

from .prompt_rules import RULES
from .prompt_sampler import StratifiedSampler
from .tiny.prompts import tiny_prompts

__all__ = ["Prompt", "StratifiedSampler", "load_prompts", "load_sources", "without_held_out"]

TINY, PACKAGED = "tiny", "packaged"


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
        source: ``"general"``; ``"ocr"``, whose prompts hold exactly one text to draw, between straight double quotes;
            or ``"geneval"``, whose rows have GenEval's ``tag``, ``include`` and ``exclude``, see
            :mod:`~gradbalance_diffusers.prompt_rules`.

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
        sources: Per source a file; ``"packaged"`` for a few dozen examples that come with this package, to try every
            command with; or ``"tiny"`` for the prompts of the packaged tiny model.
        split: Which half of packaged prompts; files are what their names say.
        limit: At most this many prompts per source, the first ones.
        seed: Order of the tiny model's prompts.

    >>> sources = load_sources({"ocr": "tiny", "general": "packaged"}, "test", limit=2)
    >>> [(name, len(prompts)) for name, prompts in sources.items()]
    [('ocr', 2), ('general', 2)]
    """
    loaded = {}
    for source, place in sources.items():
        if place == TINY:
            rows = tiny_prompts(split, source, seed=seed)  # type: ignore[arg-type]  # checked there
            loaded[source] = [_prompt(row, source, f"packaged prompt {i}") for i, row in enumerate(rows)][:limit]
        elif place == PACKAGED:
            suffix = "jsonl" if source == "geneval" else "txt"
            file = resources.files(__package__) / "prompt_examples" / f"{source}_{split}.{suffix}"
            with resources.as_file(file) as path:
                loaded[source] = load_prompts(path, source)[:limit]
        else:
            loaded[source] = load_prompts(place, source)[:limit]
    return loaded


def without_held_out(
    training: Mapping[str, Sequence[Prompt]], held_out: Mapping[str, Sequence[Prompt]]
) -> dict[str, list[Prompt]]:
    """Training prompts that no source holds out: what is evaluated on was never trained on.

    The published sets overlap in places, and their test halves have to stay as they are to compare with: so a text of
    both halves leaves the training half, and a warning counts such texts. Texts are the same if they differ only in
    case and spaces, which the CLIP tokenizers do not see.

    Raises:
        InvalidArgumentError: A source has no training prompt left.

    >>> kept = without_held_out({"ocr": [Prompt("A cat", "ocr"), Prompt("a dog", "ocr")]}, {"ocr": []})
    >>> len(kept["ocr"])
    2
    """
    reserved = {_same(prompt.text) for prompts in held_out.values() for prompt in prompts}
    kept = {name: [p for p in prompts if _same(p.text) not in reserved] for name, prompts in training.items()}
    for source, prompts in training.items():
        removed = [prompt.text for prompt in prompts if _same(prompt.text) in reserved]
        if removed and not kept[source]:
            raise InvalidArgumentError(
                f"`prompts.sources.{source}` must have prompts that `evaluation.sources` does not hold out. Found all "
                f"{len(prompts)} of them there, the first is {removed[0]!r}. Give two different files."
            )
        if removed:
            warnings.warn(
                f"{len(removed)} of the {len(prompts)} training prompts of {source!r} are held out for evaluation and "
                f"are not trained on. The first is {removed[0]!r}.",
                UserWarning,
                stacklevel=2,
            )
    return kept


def _same(text: str) -> str:
    """What texts have in common that count as the same."""
    return " ".join(text.split()).lower()


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
    if source not in RULES:
        raise InvalidArgumentError(f"`source` must be one of {', '.join(RULES)}. Found {source!r}.")
    if row.get("source", source) != source:
        raise InvalidArgumentError(
            f"{place}: the row belongs to the source {row['source']!r}, but the file is listed as {source!r}. "
            "Split the file by source."
        )
    RULES[source](row, place)
    return Prompt(row["prompt"], source, {key: value for key, value in row.items() if key not in ("prompt", "source")})
