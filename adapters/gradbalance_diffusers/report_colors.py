"""One colour per reward, all over a report."""

from __future__ import annotations

from html import escape

from .report_data import RunData

_COLORS = 8
"""The page's style sheet defines --c0 to --c7; a ninth reward shares the first one's."""


def color(run: RunData, name: str) -> str:
    """The colour of a reward, the same all over the page; ink for what is not a reward."""
    return f"var(--c{run.rewards.index(name) % _COLORS})" if name in run.rewards else "var(--ink)"


def label(run: RunData, name: str) -> str:
    """Its dot and name, as HTML."""
    dot = f'<span class="dot" style="background:{color(run, name)}"></span>'
    return f'{dot}<span class="name">{escape(name)}</span>'
