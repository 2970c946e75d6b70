"""How the scores of each model are spread, as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..charts import Series, line_chart

BINS = 24


def histogram(values: Mapping[str, Sequence[float]], colors: Mapping[str, str], title: str) -> str:
    """Outlines over common bins, one per model; the height is the share of its pictures.

    Args:
        values: Scores by model; a model without any is left out.
        colors: CSS colour by model.
        title: Above the chart.
    """
    known = {name: np.asarray(scores, dtype=np.float64) for name, scores in values.items() if len(scores)}
    series = [Series("", outline(known[name], _edges(known)), colors[name], "step") for name in known]
    return line_chart(series, title=title, zero=True)


def outline(scores: np.ndarray, edges: np.ndarray) -> list[tuple[float, float | None]]:
    """Corners of a histogram as (x, share), for a line that holds each value until the next x.

    >>> outline(np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 0.5, 1.0]))
    [(0.0, 0.0), (0.0, 0.5), (0.5, 0.5), (1.0, 0.0)]
    """
    shares = np.histogram(scores, bins=edges)[0] / len(scores)
    return [(float(edges[0]), 0.0), *zip(edges.tolist(), [*shares.tolist(), 0.0], strict=True)]


def _edges(values: Mapping[str, np.ndarray]) -> np.ndarray:
    low = min(float(scores.min()) for scores in values.values())
    high = max(float(scores.max()) for scores in values.values())
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):  # one value only
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, BINS + 1)
