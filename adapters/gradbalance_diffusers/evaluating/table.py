"""The table of an evaluation, in the layout and units of the MARBLE paper's Table 1 (arXiv 2605.06507)."""

from __future__ import annotations

from dataclasses import dataclass

from .results import Results
from .statistics import Estimate


@dataclass(frozen=True)
class Column:
    """How the table shows a metric.

    Attributes:
        title: Head of the column.
        scale: The table shows scale times the score.
        digits: Decimals.
    """

    title: str
    scale: float = 1.0
    digits: int = 3


# In the order of the paper. Its PickScore and UnifiedReward are on the models' own scales: 26 and 5 times the rewards.
PAPER = {
    "geneval": Column("GenEval", digits=2),
    "ocr": Column("OCR", digits=2),
    "pickscore": Column("PickScore", scale=26.0, digits=2),
    "clipscore": Column("CLIPScore"),
    "hpsv2": Column("HPSv2.1"),
    "aesthetic": Column("Aesthetic", digits=2),
    "imagereward": Column("ImgRwd", digits=2),
    "unifiedreward": Column("UniRwd", scale=5.0, digits=2),
}


def columns(results: Results) -> dict[str, Column]:
    """The metrics of the paper first and in its order, then all others under their own names.

    A metric is one of the paper's if both its name and what scores it are: the tiny model's ``geneval``, scored by
    geometry, stays ``geneval``.
    """
    known = {name: PAPER[name] for name in PAPER if name in results.metrics and results.kind(name) == name}
    return known | {name: Column(name) for name in results.metrics if name not in known}


def markdown_table(results: Results) -> str:
    """Means ± standard errors and the composite, a row per model; then the paired changes with their intervals."""
    shown = columns(results)
    head = [column.title for column in shown.values()]
    several = len(results.models) > 1
    lines = _head(["model", *head, *(["composite"] if several else [])])
    for model in results.models:
        cells = [_value(results.estimate(model, name), column) for name, column in shown.items()]
        composite = results.composite[model]
        extra = ([_signed(composite, 3) if composite is not None else "–"]) if several else []
        lines.append(_row([model, *cells, *extra]))
    if several:
        first = results.models[0]
        lines += ["", f"Change from {first} on the same prompts and noise, with its 95 % confidence interval:", ""]
        lines += _head(["model", *head])
        for model in results.models[1:]:
            cells = [change_text(results.change(model, name), column) for name, column in shown.items()]
            lines.append(_row([model, *cells]))
    lines += ["", notes(results)]
    return "\n".join(lines) + "\n"


def notes(results: Results) -> str:
    """What a reader of the table has to know."""
    shown = columns(results)
    pictures = sorted({len(results.folder.pictures(model)) for model in results.models})
    number = str(pictures[0]) if len(pictures) == 1 else f"{pictures[0]} to {pictures[-1]}"
    text = [f"{len(results.prompts)} prompts, {number} pictures a model. ± is one standard error over prompts."]
    scaled = [f"{column.title} is {column.scale:g} times the score" for column in shown.values() if column.scale != 1]
    if scaled:
        text.append(f"{' and '.join(scaled)}, as in the paper.")
    if len(results.models) > 1:
        text.append(
            "Composite: mean over the metrics of the z-score among the models of this table; no absolute meaning."
        )
    if results.without_value:
        text.append(f"Without a value: {', '.join(results.without_value)}.")
    open_scores = sum(max(0, results.unscored(model, name)) for model in results.models for name in shown)
    if open_scores:
        text.append(f"{open_scores} scores are missing; run --only score again.")
    return " ".join(text)


def change_text(change: Estimate, column: Column) -> str:
    """A paired change and its interval.

    >>> change_text(Estimate(0.125, 0.05, 0.0, 0.25, 9, 9), Column("x", digits=2))
    '+0.12 [+0.00, +0.25]'
    """
    if change.mean is None:
        return "–"
    text = _signed(change.mean * column.scale, column.digits)
    if change.low is None or change.high is None:
        return text
    ends = (_signed(end * column.scale, column.digits) for end in (change.low, change.high))
    return f"{text} [{', '.join(ends)}]"


def _value(estimate: Estimate, column: Column) -> str:
    if estimate.mean is None:
        return "–"
    text = f"{estimate.mean * column.scale:.{column.digits}f}".replace("-", "−")
    return text if estimate.se is None else f"{text} ± {estimate.se * column.scale:.{column.digits}f}"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), "|" + "---|" * len(cells)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
