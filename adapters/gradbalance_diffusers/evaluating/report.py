"""Write what an evaluation says: results.json, results.md, grid.png and report.html."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from ..charts import dumbbell
from ..run_folder import write_whole
from .folder import EvaluationFolder
from .histograms import histogram
from .pictures import grid_image, picture_sections
from .results import Results
from .statistics import Estimate
from .table import Column, columns, markdown_table, notes

_COLORS = 8
"""The page's style sheet defines --c0 to --c7; a ninth model shares the first one's."""


def write_results(folder: EvaluationFolder, models: Sequence[str] = ()) -> str:
    """Write the four files from the scores that are there, and return the table.

    Args:
        folder: An evaluation with scores, which need not be complete: what is missing is counted.
        models: Names of the models to compare, the first being what the others are compared with; none means all.

    Returns:
        The Markdown table, as in ``results.md``, and where the report is.

    Raises:
        InvalidArgumentError: Nothing is scored, or there is no such model.
    """
    results = Results(folder, models)
    table = markdown_table(results)
    record = json.dumps(results.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder.path / "results.json", record.encode())
    write_whole(folder.path / "results.md", table.encode())
    if (grid := grid_image(results)) is not None:
        grid.save(folder.path / "grid.png")
    write_whole(folder.path / "report.html", report_page(results).encode())
    return f"{table}\nReport: {folder.path / 'report.html'}"


def report_page(results: Results) -> str:
    """The report as one HTML page that holds its pictures and charts itself."""
    template = resources.files("gradbalance_diffusers") / "report_template.html"
    settings = results.manifests[results.models[0]]["settings"]
    name = results.folder.path.resolve().name
    sections = (_summary(results), picture_sections(results), _histograms(results), _tags(results), _left_out(results))
    return Template(template.read_text("utf-8")).substitute(
        page_title=escape(f"{headline(results)} · {name}"),
        kicker=escape(f"Evaluation · {name}"),
        headline=escape(headline(results)),
        lead=_lead(results),
        facts=_facts(results, settings),
        aspect=f"{settings['sampling.width']}/{settings['sampling.height']}",
        footer="Written by gradbalance from the pictures and scores of this evaluation.",
        sections="\n".join([*filter(None, sections), _models(results)]),
    )


def headline(results: Results) -> str:
    """What a reader wants to know first."""
    count = len(results.metrics)
    metrics = f"{count} metric{'s' if count > 1 else ''}"
    if len(results.models) == 1:
        return f"{results.models[0]} on {metrics}"
    first, last = results.models[0], results.models[-1]
    if len(results.models) == 2:
        up = sum(_clear(results.change(last, name)) > 0 for name in results.metrics)
        return f"{last} is above {first} on {up} of {metrics}"
    ranked = {model: value for model, value in results.composite.items() if value is not None}
    if not ranked:
        return f"{len(results.models)} models on {metrics}"
    return f"{max(ranked, key=lambda model: ranked[model])} ranks first of {len(results.models)} models"


def _clear(change: Estimate) -> int:
    """1 or -1 if the whole confidence interval lies on one side of zero."""
    if change.low is None or change.high is None:
        return 0
    return (change.low > 0) - (change.high < 0)


def _lead(results: Results) -> str:
    names = [_label(results, model) for model in results.models]
    text = f"Compared: {', '.join(names)}. Every model got the same prompts and the same noise. "
    if len(results.models) == 2:
        text += "“Above” means: the 95 % confidence interval of the paired change lies above zero."
    elif len(results.models) > 2:
        text += (
            "Models are ranked by the composite, the mean over the metrics of their z-scores among the models compared "
            "here. It says nothing about models that are not, and takes no account of errors."
        )
    return text


def _facts(results: Results, settings: dict[str, Any]) -> str:
    guidance = [f"{results.manifests[m]['settings']['sampling.guidance_scale']:g}" for m in results.models]
    pictures = sorted({len(results.folder.pictures(m)) for m in results.models})
    facts = {
        "Base model": f"{settings['model.path']}, {settings['model.dtype']}",
        "Prompts": str(len(results.prompts)),
        "Pictures a model": " to ".join(str(n) for n in dict.fromkeys([pictures[0], pictures[-1]])),
        "Sampling": f"{settings['sampling.steps']} {settings['sampling.solver']} steps",
        "Guidance": ", ".join(guidance if len(set(guidance)) > 1 else guidance[:1]),
    }
    return "".join(f"<li><b>{escape(k)}</b>{escape(v)}</li>" for k, v in facts.items())


def _summary(results: Results) -> str:
    shown = columns(results)
    heads = "".join(f"<th>{_label(results, model)}</th>" for model in results.models)
    pair = len(results.models) == 2
    rows = ""
    for name, column in shown.items():
        cells = "".join(_cell(results, model, name, column) for model in results.models)
        rows += f'<tr><td><span class="name">{escape(column.title)}</span></td>'
        rows += (f'<td class="wide">{_bar(results, name, column)}</td>' if pair else "") + f"{cells}</tr>"
    if len(results.models) > 1:
        cells = "".join(f"<td>{_composite(results, model)}</td>" for model in results.models)
        rows += f'<tr><td><span class="name">composite</span></td>{"<td></td>" if pair else ""}{cells}</tr>'
    changes = (
        f" Below each mean: the paired change from {escape(results.models[0])} with its 95 % confidence interval, "
        "coloured where that lies on one side of zero."
        if len(results.models) > 1
        else ""
    )
    if pair:
        changes += (
            f" Hollow: {escape(results.models[0])}; full: {escape(results.models[1])}; the band is one standard error "
            "of the change. Lines run from 0 to 1, or around the two values where they lie outside."
        )
    return (
        f'<h2>Scores</h2><p class="note">{escape(notes(results))}{changes}</p><div class="scroll"><table>'
        f"<tr><th>Metric</th>{'<th></th>' if pair else ''}{heads}</tr>{rows}</table></div>"
    )


def _cell(results: Results, model: str, name: str, column: Column) -> str:
    estimate = results.estimate(model, name)
    if estimate.mean is None:
        return "<td>–</td>"
    error = "" if estimate.se is None else f' <span class="error">± {_number(estimate.se, column)}</span>'
    text = f"{_number(estimate.mean, column)}{error}"
    change = results.change(model, name)
    if model != results.models[0] and change.mean is not None:
        tone = {1: "up", -1: "down", 0: ""}[_clear(change)]
        text += f'<br><span class="change {tone}">{_number(change.mean, column, "+")}</span>'
        if change.low is not None and change.high is not None:
            ends = f"{_number(change.low, column, '+')}, {_number(change.high, column, '+')}"
            text += f' <span class="error">[{ends}]</span>'
    return f"<td>{text}</td>"


def _bar(results: Results, name: str, column: Column) -> str:
    before, after = (results.estimate(model, name).mean for model in results.models)
    if before is None or after is None:
        return ""
    before, after = before * column.scale, after * column.scale
    within = all(0 <= value <= 1 for value in (before, after))
    span = abs(after - before) or abs(before) or 1.0
    low, high = (0.0, 1.0) if within else (min(before, after) - span, max(before, after) + span)
    error = results.change(results.models[1], name).se
    return dumbbell(
        before, after, None if error is None else error * column.scale, _color(results, results.models[1]), low, high
    )


def _histograms(results: Results) -> str:
    colors = {model: _color(results, model) for model in results.models}
    charts = [
        histogram(
            {m: list(results.values(m, name).values()) for m in results.models}, colors, f"{name}, share of pictures"
        )
        for name in results.metrics
    ]
    key = "".join(f"<span>{_label(results, model)}</span>" for model in results.models)
    return (
        '<h2>How the scores are spread</h2><p class="note">In the units of the metrics, over the pictures that each '
        f'applies to.</p><p class="facts">{key}</p><div class="panels">{"".join(charts)}</div>'
    )


def _tags(results: Results) -> str:
    """A table per metric whose prompts carry tags, such as the six tasks of GenEval."""
    html = ""
    for name in results.metrics:
        by_model = {model: results.tags(model, name) for model in results.models}
        tags = sorted({tag for found in by_model.values() for tag in found})
        if len(tags) > 1:
            head = "".join(f"<th>{escape(tag.replace('_', ' '))}</th>" for tag in tags)
            rows = "".join(
                f"<tr><td>{_label(results, model)}</td>"
                + "".join(f"<td>{_plain(found.get(tag))}</td>" for tag in tags)
                + "</tr>"
                for model, found in by_model.items()
            )
            table = f"<table><tr><th>Model</th>{head}</tr>{rows}</table>"
            html += f'<h3>{escape(name)} by task</h3><div class="scroll">{table}</div>'
    return html


def _left_out(results: Results) -> str:
    heads = "".join(f"<th>{_label(results, model)}</th>" for model in results.models)
    rows = ""
    for name in results.metrics:
        cells = "".join(f"<td>{_coverage(results, model, name)}</td>" for model in results.models)
        rows += f"<tr><td>{escape(name)}</td>{cells}</tr>"
    return (
        '<h2>What was left out</h2><p class="note">Pictures with a score, of all pictures of the model. A metric has '
        "none where it does not apply; a picture is unscored where scoring has not come to it, or its score was "
        "lost.</p>"
        f'<div class="scroll"><table><tr><th>Metric</th>{heads}</tr>{rows}</table></div>'
    )


def _coverage(results: Results, model: str, name: str) -> str:
    unscored = results.unscored(model, name)
    text = f'{len(results.values(model, name))} <span class="error">of {len(results.folder.pictures(model))}</span>'
    return text + (f' <span class="down">{unscored} unscored</span>' if unscored else "")


def _models(results: Results) -> str:
    text = escape(json.dumps(results.manifests, indent=1, ensure_ascii=False))
    return f"<h2>Models</h2><details><summary>What the pictures were made with</summary><pre>{text}</pre></details>"


def _composite(results: Results, model: str) -> str:
    value = results.composite[model]
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def _plain(estimate: Estimate | None) -> str:
    if estimate is None or estimate.mean is None:
        return "–"
    error = "" if estimate.se is None else f' <span class="error">± {estimate.se:.3f}</span>'
    return f"{estimate.mean:.3f}{error}"


def _number(value: float, column: Column, sign: str = "") -> str:
    return f"{value * column.scale:{sign}.{column.digits}f}".replace("-", "−")


def _color(results: Results, model: str) -> str:
    return f"var(--c{results.models.index(model) % _COLORS})"


def _label(results: Results, model: str) -> str:
    dot = f'<span class="dot" style="background:{_color(results, model)}"></span>'
    return f'{dot}<span class="name">{escape(model)}</span>'
