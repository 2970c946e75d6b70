"""What the prompts of each source must have, checked when they are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from gradbalance.errors import InvalidArgumentError

from .rewards.geneval_request import read_request

GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""GenEval's kinds of prompts (Ghosh et al. 2023, arXiv 2310.11513)."""


def check_general(row: dict[str, Any], place: str) -> None:
    """General prompts have no rule of their own."""


def check_ocr(row: dict[str, Any], place: str) -> None:
    """Exactly one text to draw, between straight double quotes.

    Raises:
        InvalidArgumentError: With ``place``, the file and line.
    """
    pieces = row["prompt"].split('"')
    if len(pieces) != 3 or not pieces[1].strip():
        raise InvalidArgumentError(
            f"{place}: an OCR prompt must hold exactly one text to draw, between straight double quotes. "
            f"Found {row['prompt']!r}."
        )


def check_geneval(row: dict[str, Any], place: str) -> None:
    """``include`` is a list of ``{"class": str, "count": int}``, each possibly with ``color`` and ``position``.

    ``exclude`` is such a list or missing; ``tag`` is one of :data:`GENEVAL_TAGS` or missing. Classes and colors may be
    any: which of them can be seen is for the reward to say.

    Raises:
        InvalidArgumentError: With ``place``, the file and line.
    """
    tag = row.get("tag")
    if tag is not None and tag not in GENEVAL_TAGS:
        close = difflib.get_close_matches(str(tag), GENEVAL_TAGS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InvalidArgumentError(
            f'{place}: the "tag" of a GenEval prompt must be one of {", ".join(GENEVAL_TAGS)}. Found {tag!r}.{hint}'
        )
    try:
        read_request(
            row.get("include"),  # type: ignore[arg-type]  # what it is, is checked there
            row.get("exclude"),
            tag,
            classes=_named(row, "class"),
            colors=_named(row, "color"),
        )
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{place}: a GenEval prompt: {error}") from None


def _named(row: dict[str, Any], key: str) -> list[str]:
    """Texts that the entries of a row have under ``key``."""
    entries = [e for part in ("include", "exclude") if isinstance(row.get(part), list) for e in row[part]]
    values = [entry.get(key) for entry in entries if isinstance(entry, dict)]
    return [value for value in values if isinstance(value, str) and value]


RULES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "general": check_general,
    "ocr": check_ocr,
    "geneval": check_geneval,
}
