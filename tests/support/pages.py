"""The pages that people read, README included, and the fenced blocks on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: Path of its page, from the root.
        number: Its place among the page's blocks of the same language, from 0.
        language: As written behind the fence.
        code: What is inside.
        line: Of its first line of code.
    """

    page: str
    number: int
    language: str
    code: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    """``docs/balancers/mgda.md`` from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(language: str, page: Path | None = None) -> Iterator[Block]:
    """Blocks of a language, of all pages or of one."""
    for path in PAGES if page is None else [page]:
        text = path.read_text(encoding="utf-8")
        found = [match for match in _FENCE.finditer(text) if match[1] == language]
        for number, match in enumerate(found):
            yield Block(name_of(path), number, language, match[2], text.count("\n", 0, match.start(2)) + 1)


def prose(page: Path) -> str:
    """A page without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
