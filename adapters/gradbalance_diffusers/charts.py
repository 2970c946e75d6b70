"""Small charts as inline SVG. Colours are CSS variables of the page, so they follow its light and dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line or set of dots.

    Attributes:
        label: Written at its right end; empty for none.
        points: (x, y) by rising x; a y of None leaves a gap.
        color: Any CSS colour.
        style: ``line``, a ``faint`` line behind others, a ``step`` line that holds each value, or ``dots``.
        errors: Half length of the error bar of every point, None where it is not known.
    """

    label: str
    points: Sequence[Point]
    color: str
    style: Literal["line", "faint", "step", "dots"] = "line"
    errors: Sequence[float | None] | None = None


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.log
            else (
                self.low,
                self.high,
                value,
            )
        )
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    log: bool = False,
    zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    width: int = 360,
    height: int = 200,
    right: int | None = None,
) -> str:
    """An SVG line chart with a title, few grid lines and labels at the lines instead of a legend.

    Args:
        series: What to draw; without a single finite point the chart says "no data".
        title: Above the chart, and its accessible name.
        log: Logarithmic y axis; values that are not positive leave gaps, error bars that reach zero are not drawn.
        zero: Include y = 0 and draw it as a strong line.
        marks: (x, text) of vertical lines, such as the first step of a stage.
        width: Of the drawing, in its own units.
        height: Of the drawing.
        right: Room for the labels; None measures them.
    """
    series = [_usable(s, log) for s in series]
    ys = [value for s in series for value in _extent(s)]
    if not ys:
        return _svg(width, height, title, f'<text class="tick" x="12" y="{height / 2:.0f}">no data</text>')
    xs = [x for s in series for x, _ in s.points]
    low, high = _range(ys, log=log, zero=zero)
    ticks = log_ticks(low, high) if log else nice_ticks(low, high)
    texts = [number(tick) for tick in ticks]
    left = max(42.0, 14 + 6.2 * max(map(len, texts), default=1))  # usually the same, so that panels line up
    room = 10 + 6.4 * max((len(s.label) for s in series), default=0) if right is None else right
    x_axis = _Axis(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, left, width - room)
    y_axis = _Axis(low, high, height - 22, 30, log)
    parts = []
    for tick, text in zip(ticks, texts, strict=True):
        y = y_axis(tick)
        strong = " zero" if zero and tick == 0 else ""
        parts.append(f'<line class="grid{strong}" x1="{left:.1f}" x2="{width - room:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 6:.1f}" y="{y + 3.5:.1f}">{text}</text>')
    x_ticks = nice_ticks(x_axis.low, x_axis.high, most=4)
    for tick in x_ticks:
        x = x_axis(tick)
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{height - 6}">{number(tick)}</text>')
    for x_mark, text in marks:
        x = x_axis(x_mark)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{height - 22}"/>')
        parts.append(f'<text class="tick" x="{x + 3:.1f}" y="38">{escape(text)}</text>')
    order = {"faint": 0, "line": 1, "step": 1, "dots": 2}
    parts += [_draw(s, x_axis, y_axis) for s in sorted(series, key=lambda s: order[s.style])]
    parts += _end_labels(series, y_axis, width - room + 6, height)
    return _svg(width, height, title, "".join(parts))


def dumbbell(
    before: float, after: float, error: float | None, color: str, low: float, high: float, width: int = 260
) -> str:
    """A hollow dot before, a full one after, on a common line from ``low`` to ``high``; a whisker of +- ``error``."""
    axis = _Axis(low, high, 8, width - 8)
    a, b = axis(before), axis(after)
    whisker = ""
    if error is not None:
        start, end = axis(max(low, after - error)), axis(min(high, after + error))
        whisker = (
            f'<line x1="{start:.1f}" x2="{end:.1f}" y1="12" y2="12" stroke="{color}" stroke-width="9" opacity=".22"/>'
        )
    return (
        f'<svg class="dumbbell" viewBox="0 0 {width} 24" role="img" aria-label="{number(before)} to {number(after)}">'
        f'<line class="grid" x1="8" x2="{width - 8}" y1="12" y2="12"/>{whisker}'
        f'<line x1="{a:.1f}" x2="{b:.1f}" y1="12" y2="12" stroke="{color}" stroke-width="2.5"/>'
        f'<circle cx="{a:.1f}" cy="12" r="4" fill="var(--paper)" stroke="{color}" stroke-width="1.8"/>'
        f'<circle cx="{b:.1f}" cy="12" r="5" fill="{color}"/></svg>'
    )


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most ``most`` round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``.

    >>> nice_ticks(0.0, 1.0)
    [0.0, 0.5, 1.0]
    """
    span = high - low
    magnitude = 10.0 ** math.floor(math.log10(span / most))
    for step in (magnitude * m for m in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]
    return [low, high]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two positive numbers; with fewer than two of them, 1, 2 and 5 times such a power.

    >>> log_ticks(0.05, 30)
    [0.1, 1.0, 10.0]
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(powers) >= 2:
        return powers[:: -(-len(powers) // 5)]
    return [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]


def number(value: float) -> str:
    """A number in few characters, with a true minus sign.

    >>> number(0.25), number(-1200.0), number(0.00002)
    ('0.25', '−1200', '2e−5')
    """
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2g}"
    mantissa, e, exponent = text.partition("e")
    return (mantissa + e + (str(int(exponent)) if e else "")).replace("-", "−")


def _usable(series: Series, log: bool) -> Series:
    keep = [(x, y if y is not None and math.isfinite(y) and (y > 0 or not log) else None) for x, y in series.points]
    errors = series.errors
    if errors is not None and log:
        pairs = zip(keep, errors, strict=True)
        errors = [e if e is not None and y is not None and e < y else None for (_, y), e in pairs]
    return Series(series.label, keep, series.color, series.style, errors)


def _extent(series: Series) -> list[float]:
    """The values a series reaches, error bars included."""
    errors = series.errors or [None] * len(series.points)
    pairs = [(y, e or 0.0) for (_, y), e in zip(series.points, errors, strict=True) if y is not None]
    return [value for y, e in pairs for value in (y - e, y + e)]


def _range(ys: Sequence[float], *, log: bool, zero: bool) -> tuple[float, float]:
    low, high = min(ys), max(ys)
    if log:
        return low / 1.15, high * 1.15
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = 0.06 * (high - low) or max(abs(high), 1.0) * 0.05
    return (low - pad if low != 0 or not zero else low), high + pad


def _draw(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    if series.style == "dots":
        return _dots(series, x_axis, y_axis)
    commands, previous = [], None
    for x, y in series.points:
        if y is None:
            previous = None
            continue
        place = f"{x_axis(x):.1f},{y_axis(y):.1f}"
        if previous is None:
            commands.append(f"M{place}")
        else:
            commands.append((f"H{x_axis(x):.1f}" if series.style == "step" else "") + f"L{place}")
        previous = y
    look = 'stroke-width="1" opacity=".3"' if series.style == "faint" else 'stroke-width="2"'
    return f'<path d="{"".join(commands)}" fill="none" stroke="{series.color}" stroke-linejoin="round" {look}/>'


def _dots(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for (x, y), error in zip(series.points, series.errors or [None] * len(series.points), strict=True):
        if y is None:
            continue
        px, py = x_axis(x), y_axis(y)
        if error is not None:
            parts.append(
                f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{y_axis(y - error):.1f}" y2="{y_axis(y + error):.1f}" '
                f'stroke="{series.color}" stroke-width="1.4"/>'
            )
        hint = f"<title>{number(x)}: {number(y)}{f' ± {number(error)}' if error is not None else ''}</title>"
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{series.color}">{hint}</circle>')
    return "".join(parts)


def _end_labels(series: Sequence[Series], y_axis: _Axis, x: float, height: int) -> list[str]:
    """Labels at the last value of each series, pushed apart until none covers another."""
    labelled = [(s, [y for _, y in s.points if y is not None]) for s in series if s.label]
    shown = sorted(((y_axis(ys[-1]), s) for s, ys in labelled if ys), key=lambda place: place[0])
    heights = [y for y, _ in shown]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + 13)
    floor = height - 20.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], floor)
        floor = heights[i] - 13
    return [
        f'<text class="label" x="{x:.1f}" y="{y + 4:.1f}" fill="{s.color}">{escape(s.label)}</text>'
        for y, (_, s) in zip(heights, shown, strict=True)
    ]


def _svg(width: int, height: int, title: str, content: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f'<text class="title" x="2" y="14">{escape(title)}</text>{content}</svg>'
    )
