"""The section of a report on conflicts: whether the rewards pull apart, as far as a run can tell."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from .charts import number
from .report_colors import color, label
from .report_data import Row, RunData

_TITLE = "<h2>Do the rewards conflict?</h2>"


def conflicts_section(run: RunData) -> str:
    """Empty where no per-reward gradients were collected, or of a single reward."""
    if run.measured is not None:
        return _measured(run, run.measured)
    cosines = {(a, b): run.mean_conflict(a, b) for a in run.objectives for b in run.objectives if a != b}
    if all(value is None for value in cosines.values()):
        return ""
    heat = _heat_map(run, run.objectives, lambda a, b: _cell(cosines[a, b], known=True))
    return (
        f'{_TITLE}<p class="note">Mean cosine between two rewards’ gradients within the batches of '
        f"{len(run.refreshes)} refreshes. This does not answer the question: noise that two rewards do not share draws "
        "such a cosine towards zero, noise that they share draws it to the noise’s own. With "
        "<code>balance.measure_conflicts: true</code> a run estimates the cosines of the expected gradients."
        f"{_centering(run)}</p>{heat}"
    )


def _measured(run: RunData, row: Row) -> str:
    batches, pairs = row["expected"]["batches"], row["expected"]["pairs"]
    by_names = {frozenset((pair["first"], pair["second"])): pair for pair in pairs}
    names = [name for name in run.objectives if any(name in both for both in by_names)]
    verdicts = [pair["verdict"] for pair in pairs]
    conflict, aligned, unknown = (verdicts.count(verdict) for verdict in ("conflict", "aligned", "not yet known"))
    of_stage = f" of stage “{escape(row['stage'])}”" if run.stage_marks else ""
    heat = _heat_map(run, names, lambda a, b: _pair_cell(by_names[frozenset((a, b))]))
    body = "".join(_pair_row(run, pair) for pair in pairs)
    return (
        f"{_TITLE}<p>Of {len(pairs)} pairs of rewards <b>{conflict}</b> conflict and <b>{aligned}</b> are aligned; of "
        f"<b>{unknown}</b> it is not yet known.</p>"
        '<p class="note">Cosines between the <i>expected</i> gradients of two rewards, from the batches of '
        f"{batches} refreshes{of_stage}: only products between different batches count, so batch noise does not bias "
        "them. ± is one standard error (jackknife); a pair is called conflicting or aligned where its cosine is "
        "further from zero than chance alone would bring one unrelated pair in twenty, which takes more of them after "
        "few refreshes. "
        f"And as the policy moved in between, this is an average over its way.{_centering(run)}</p>"
        f'{heat}<div class="scroll"><table class="pairs"><tr><th>Rewards</th><th>Expected cosine</th>'
        f"<th>In one batch</th><th>Verdict</th></tr>{body}</table></div>"
    )


def _centering(run: RunData) -> str:
    if run.config.loss.center:
        return ""
    return (
        " These gradients hold the part of the loss that all rewards share (<code>loss.center: false</code>), which "
        "makes any two of them look alike."
    )


def _heat_map(run: RunData, names: list[str], cell: Callable[[str, str], str]) -> str:
    head = "".join(f'<th style="color:{color(run, name)}">{escape(name)}</th>' for name in names[:-1])
    body = ""
    for i, a in enumerate(names[1:], start=1):
        body += f'<tr><th style="color:{color(run, a)}">{escape(a)}</th>'
        body += "".join(cell(a, b) for b in names[:i]) + "</tr>"
    return f'<div class="scroll"><table class="heat"><tr><th></th>{head}</tr>{body}</table></div>'


def _pair_cell(pair: Row) -> str:
    return _cell(pair["cosine"], known=pair["verdict"] != "not yet known")


def _cell(value: float | None, *, known: bool) -> str:
    """Coloured where it is known; in brackets where it is not."""
    if value is None:
        return "<td>–</td>"
    text = number(round(value, 2))
    if not known:
        return f'<td class="unknown">({text})</td>'
    base, share = "var(--agree)" if value >= 0 else "var(--pull)", round(min(1.0, abs(value)) * 75)
    return f'<td style="background:color-mix(in srgb, {base} {share}%, var(--card))">{text}</td>'


def _pair_row(run: RunData, pair: Row) -> str:
    cosine, error, in_batch = pair["cosine"], pair["error"], pair["in_batch"]
    estimate = "noise hides it" if cosine is None else f"{_signed(cosine)}{_plus_minus(error)}"
    tone = {"conflict": "down", "aligned": "up"}.get(pair["verdict"], "error")
    return (
        f"<tr><td>{label(run, pair['first'])} and {label(run, pair['second'])}</td><td>{estimate}</td>"
        f"<td>{'–' if in_batch is None else _signed(in_batch)}</td>"
        f'<td><span class="{tone}">{escape(pair["verdict"])}</span></td></tr>'
    )


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f' <span class="error">± {error:.2f}</span>'


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.2f}"
