"""The section of a report on the gradients: coefficients, cosines, norms and weights."""

from __future__ import annotations

from typing import Literal

from .charts import Series, line_chart
from .report_colors import color
from .report_data import RunData, thinned


def balance_section(run: RunData) -> str:
    """Empty before the first optimizer step."""
    if not run.train:
        return ""
    charts = []
    if any(row.get("coefficients") for row in run.train):
        charts.append(_lines(run, "coefficients", "Coefficients of the balanced direction", style="step", zero=True))
    if run.refreshes:
        charts.append(_cosine_chart(run))
    if any(row.get("norms") for row in run.train):
        charts.append(_lines(run, "norms", "Norm of each reward’s gradient", log=True))
    charts.append(_lines(run, "weights", "Weight on each reward’s raw gradient", style="step", log=True))
    text = "This method collected no per-reward gradients."
    if run.refreshes:
        opposed = sum(min(_known(row["cosines"])) < 0 for row in run.refreshes if _known(row["cosines"]))
        text = (
            f"On {len(run.refreshes)} of {len(run.train)} optimizer steps every reward’s own gradient was collected. "
            f"The direction taken opposed at least one of them on {opposed} of these steps."
        )
    return (
        f'<h2>How the gradients were balanced</h2><p class="note">{text}</p>'
        f'<div class="panels broad">{"".join(charts)}</div>'
    )


def _lines(
    run: RunData,
    field: str,
    title: str,
    *,
    style: Literal["line", "step"] = "line",
    log: bool = False,
    zero: bool = False,
) -> str:
    series = []
    for name in run.objectives:
        known = [point for point in run.named(field, name) if point[1] is not None]
        if style == "step" and known:
            known.append((run.train[-1]["step"], known[-1][1]))  # a value holds until the next one
        series.append(Series(name, thinned(known), color(run, name), style))
    return line_chart(series, title=title, log=log, zero=zero, marks=run.stage_marks, width=480, height=250)


def _cosine_chart(run: RunData) -> str:
    rows = [(row["step"], _known(row["cosines"])) for row in run.refreshes]
    worst = [(step, min(values)) for step, values in rows if values]
    mean = [(step, sum(values) / len(values)) for step, values in rows if values]
    series = [
        Series("mean", thinned(mean), "var(--soft)"),
        Series("worst", thinned(worst), "var(--ink)"),
        Series("", [point for point in worst if point[1] < 0], "var(--warn)", "dots"),
    ]
    title = "Cosine of the direction with the rewards’ own gradients"
    return line_chart(series, title=title, zero=True, marks=run.stage_marks, width=480, height=250)


def _known(values: dict[str, float | None]) -> list[float]:
    return [value for value in values.values() if value is not None]
