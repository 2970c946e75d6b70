"""Figures in tables keep together: no line breaks within ``0.1 ± 0.2 %``, ``[-1, +2]`` and ``4e-33``."""

from __future__ import annotations

import re
from typing import Any

_CELL = re.compile(r"<td[^>]*>[^<]*</td>")
_FIGURE = re.compile(r"\[[-+\d., ]+\]|\(?[-+]?\d[\d.]*(?:e[-+]\d+|(?: ± [\d.]+)?(?: %)?)\)?")


def on_page_content(content: str, **_: Any) -> str:
    """Mark what has a place to break; the style sheet forbids it there.

    >>> on_page_content("<td>-0.1 ± 0.2 %</td><td>0.9 [-1, 2]</td><td>3 tasks</td>")
    '<td><span class="figure">-0.1 ± 0.2 %</span></td><td>0.9 <span class="figure">[-1, 2]</span></td><td>3 tasks</td>'
    """
    return _CELL.sub(lambda cell: _FIGURE.sub(_marked, cell[0]), content)


def _marked(figure: re.Match[str]) -> str:
    breaks = " " in figure[0] or "e-" in figure[0]
    return f'<span class="figure">{figure[0]}</span>' if breaks else figure[0]
