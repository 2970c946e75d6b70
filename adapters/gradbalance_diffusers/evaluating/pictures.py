"""Pictures of an evaluation side by side: which ones are shown, by a fixed rule, and how."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from PIL import Image, ImageDraw, ImageFont

from ..figures import image_grid
from ..report_pictures import inline_picture
from .results import Results
from .work import Picture

BEST, WORST, FIRST = 4, 4, 4
_CRISP = 96
"""Pictures up to this many pixels wide are enlarged without blur."""
_CELL = 128
_LABEL = 110


@dataclass(frozen=True)
class Case:
    """A picture that every model has made.

    Attributes:
        picture: Its prompt and sample.
        gain: Mean over the metrics of (last model - first model) / standard deviation of the first model's scores; None
            where no metric applies.
    """

    picture: Picture
    gain: float | None


def cases(results: Results) -> list[Case]:
    """Every picture that all models have, in the order of prompts, then samples."""
    common = set.intersection(*(results.folder.pictures(model) for model in results.models))
    first, last = results.models[0], results.models[-1]
    spread = {name: _spread(list(results.values(first, name).values())) for name in results.metrics}
    ordered = sorted(common, key=lambda picture: (picture.prompt, picture.sample))
    return [Case(picture, _gain(results, picture, first, last, spread)) for picture in ordered]


def first_of_each_source(results: Results, found: Sequence[Case], count: int = FIRST) -> list[Case]:
    """Sample 0 of the first ``count`` prompts of each source."""
    kept: dict[str, list[Case]] = {}
    for case in found:
        of_source = kept.setdefault(results.prompts[case.picture.prompt].source, [])
        if case.picture.sample == 0 and len(of_source) < count:
            of_source.append(case)
    return [case for of_source in kept.values() for case in of_source]


def picture_sections(results: Results) -> str:
    """Largest gains, smallest gains, and the first prompts of each source."""
    found = cases(results)
    if not found:
        return ""
    shown = first_of_each_source(results, found)
    html = "<h2>Same prompt, same noise</h2>"
    ranked = sorted((case for case in found if case.gain is not None), key=lambda case: -(case.gain or 0.0))
    if len(results.models) > 1 and len(ranked) > BEST + WORST:
        first, last = escape(results.models[0]), escape(results.models[-1])
        html += (
            f'<p class="note">Chosen by a rule, not by eye. Gain is the mean, over the metrics that apply, of the '
            f"change from {first} to {last}, divided by the standard deviation of the scores of {first}; of all "
            f"{len(found)} pictures, those with the largest and the smallest gain, then the first {FIRST} prompts of "
            f"each source.</p><h3>Largest gain of {last}</h3>{_grid(results, ranked[:BEST])}"
            f"<h3>Smallest gain of {last}, or a loss</h3>{_grid(results, ranked[-WORST:][::-1])}"
        )
    return html + f"<h3>The first prompts of each source</h3>{_grid(results, shown)}"


def grid_image(results: Results) -> Image.Image | None:
    """A row of pictures per model: the first prompts of each source; None if there is none that all have."""
    shown = first_of_each_source(results, cases(results))
    if not shown:
        return None
    rows = [_cell(results, model, case.picture) for model in results.models for case in shown]
    captions = [""] * (len(rows) - len(shown)) + [results.prompts[case.picture.prompt].text for case in shown]
    grid = image_grid(rows, columns=len(shown), scale=max(1, _CELL // rows[0].width), captions=captions)
    page = Image.new("RGB", (grid.width + _LABEL, grid.height), "white")
    page.paste(grid, (_LABEL, 0))
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for row, model in enumerate(results.models):
        draw.text((8, int((row + 0.45) * grid.height / len(results.models))), model[:16], "#333333", font)
    return page


def _grid(results: Results, shown: Sequence[Case]) -> str:
    count = len(results.models)
    crisp = " crisp" if _width(results, shown[0]) <= _CRISP else ""
    style = f"grid-template-columns:repeat(auto-fill,minmax({min(118 * max(2, count), 1060)}px,1fr))"
    return f'<div class="cases{crisp}" style="{style}">{"".join(_figure(results, case) for case in shown)}</div>'


def _figure(results: Results, case: Case) -> str:
    prompt = results.prompts[case.picture.prompt].text
    paths = {model: results.folder.image_path(model, case.picture) for model in results.models}
    pictures = "".join(
        f'<div><img src="{inline_picture(path)}" alt="{escape(f"{model}: {prompt}")}">'
        f"<span>{escape(model)}</span></div>"
        for model, path in paths.items()
    )
    scores, join = "", " → " if len(results.models) == 2 else " · "
    for metric in results.metrics:
        values = [results.values(model, metric).get(case.picture) for model in results.models]
        if any(value is not None for value in values):
            text = join.join("–" if value is None else f"{value:.2f}".replace("-", "−") for value in values)
            scores += f"<b>{escape(metric)}</b><span>{text}</span>"
    columns = f"grid-template-columns:repeat({len(paths)},1fr)"
    return (
        f'<figure><div class="pair" style="{columns}">{pictures}</div><figcaption>{escape(prompt)}'
        f'<div class="scores">{scores}</div></figcaption></figure>'
    )


def _cell(results: Results, model: str, picture: Picture) -> Image.Image:
    with Image.open(results.folder.image_path(model, picture)) as image:
        small = image.convert("RGB")
    small.thumbnail((_CELL, _CELL), Image.Resampling.LANCZOS)
    return small


def _width(results: Results, case: Case) -> int:
    with Image.open(results.folder.image_path(results.models[0], case.picture)) as image:
        return image.width


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _gain(results: Results, picture: Picture, first: str, last: str, spread: Mapping[str, float]) -> float | None:
    changes = [
        (after - before) / spread[name]
        for name in results.metrics
        if spread[name] > 0
        and (before := results.values(first, name).get(picture)) is not None
        and (after := results.values(last, name).get(picture)) is not None
    ]
    return statistics.fmean(changes) if changes else None
