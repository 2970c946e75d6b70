"""Before/after pictures of a report: which ones are shown, by a fixed rule, and how."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from .figures import data_uri
from .report_colors import color
from .report_data import Row, RunData

BEST, WORST = 8, 4
_CRISP = 96
"""Pictures up to this many pixels wide are enlarged without blur."""
_LARGEST = 320
"""Wider pictures are reduced to this, so that a page stays a few megabytes."""


@dataclass(frozen=True)
class Case:
    """One held-out prompt before and after training.

    Attributes:
        prompt: Its text.
        before: Score per reward, None where it does not apply.
        after: The same after training.
        gain: Mean over its rewards of (after - before) / standard deviation of the untrained scores over all prompts.
        pictures: The two PNG files.
    """

    prompt: str
    before: dict[str, float | None]
    after: dict[str, float | None]
    gain: float
    pictures: tuple[Path, Path]


def cases(run: RunData) -> list[Case]:
    """Every held-out prompt with a picture before and after, largest gain first."""
    if len(run.evaluations) < 2:
        return []
    first, last = run.scores(run.evaluations[0]), run.scores(run.evaluations[-1])
    if first is None or last is None:
        return []
    spread = {name: _spread(first, name) for name in run.rewards}
    found = []
    for index in first["grid"]:
        before, after = first["prompts"][index], last["prompts"][index]
        names = [f"epoch-{record['epoch']:04d}" for record in (first, last)]
        pictures = [run.path / "evaluations" / name / f"{index:03d}.png" for name in names]
        if before["prompt"] == after["prompt"] and all(path.is_file() for path in pictures):
            gain = _gain(before["scores"], after["scores"], spread)
            found.append(Case(before["prompt"], before["scores"], after["scores"], gain, (pictures[0], pictures[1])))
    return sorted(found, key=lambda case: -case.gain)


def picture_sections(run: RunData) -> str:
    """The section with the best and the worst cases, and a fold with all others."""
    found = cases(run)
    if not found:
        return ""
    worst = found[-WORST:][::-1] if len(found) > BEST else []
    best = found[: min(BEST, len(found) - len(worst))]
    rest = found[len(best) : len(found) - len(worst)]
    per_source = run.config.evaluation.saved_images
    text = (
        f"Chosen by a rule, not by eye: of the {len(found)} pictures kept (the first {per_source} held-out prompts of "
        f"each source), the {len(best)} with the largest and the {len(worst)} with the smallest gain. Gain is the "
        "mean, over the rewards that apply, of the change divided by the standard deviation of the untrained policy’s "
        "scores. Both pictures start from the same noise."
    )
    html = f'<h2>Same prompt, same noise</h2><p class="note">{text}</p><h3>Largest gain</h3>{_grid(run, best)}'
    if worst:
        html += f"<h3>Smallest gain, or a loss</h3>{_grid(run, worst)}"
    if rest:
        html += f"<details><summary>The other {len(rest)} pictures</summary>{_grid(run, rest)}</details>"
    return html


def _grid(run: RunData, shown: list[Case]) -> str:
    crisp = " crisp" if run.config.model.width <= _CRISP else ""
    return f'<div class="cases{crisp}">{"".join(_figure(run, case) for case in shown)}</div>'


def _figure(run: RunData, case: Case) -> str:
    pair = "".join(
        f'<div><img src="{inline_picture(path)}" alt="{escape(f"{word}: {case.prompt}")}"><span>{word}</span></div>'
        for word, path in zip(("before", "after"), case.pictures, strict=True)
    )
    scores = "".join(
        f'<b style="color:{color(run, name)}">{escape(name)}</b>'
        f'<span>{b:.2f} → <span class="{"down" if round(a, 2) < round(b, 2) else ""}">{a:.2f}</span></span>'
        for name in run.rewards
        if (b := case.before.get(name)) is not None and (a := case.after.get(name)) is not None
    )
    return (
        f'<figure><div class="pair">{pair}</div><figcaption>{escape(case.prompt)}'
        f'<div class="scores">{scores}</div></figcaption></figure>'
    )


def inline_picture(path: Path) -> str:
    """A picture file as a ``data:`` address, reduced if it is large."""
    with Image.open(path) as image:
        if image.width <= _LARGEST:
            return data_uri(path)
        smaller = image.convert("RGB")
        smaller.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
        return data_uri(smaller)


def _spread(record: Row, name: str) -> float:
    values = [v for row in record["prompts"] if (v := row["scores"].get(name)) is not None]
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _gain(before: dict[str, float | None], after: dict[str, float | None], spread: dict[str, float]) -> float:
    changes = [
        (a - b) / spread[name]
        for name in spread
        if spread[name] > 0 and (b := before.get(name)) is not None and (a := after.get(name)) is not None
    ]
    return statistics.fmean(changes) if changes else 0.0
