"""report.html: one self-contained page that tells what a run did."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Literal

from .charts import Series, dumbbell, line_chart, number
from .report_data import Row, RunData, read_run, running_mean, thinned
from .report_pictures import picture_sections
from .run_folder import write_whole

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_COLORS = 8


def write_report(run_folder_path: str | Path) -> Path:
    """Write ``report.html`` into the folder of a run, finished or going on.

    The page holds its pictures and charts itself: rewards before and after on held-out prompts, reward curves,
    coefficients, cosines and norms, what was skipped, before/after pictures chosen by a stated rule, the configuration.

    Args:
        run_folder_path: The folder, as :class:`gradbalance_diffusers.run_folder.RunFolder` writes it.

    Returns:
        The page.

    Raises:
        InvalidArgumentError: The folder holds no run.
    """
    run = read_run(run_folder_path)
    template = resources.files(__package__) / "report_template.html"
    model = run.config.model
    page = Template(template.read_text("utf-8")).substitute(
        page_title=escape(f"{headline(run)} · {run.path.name}"),
        kicker=escape(f"Training report · {run.path.name}"),
        headline=escape(headline(run)),
        lead=_lead(run),
        facts=_facts(run),
        aspect=f"{model.width}/{model.height}",
        sections="\n".join(
            section
            for section in (
                _summary(run),
                picture_sections(run, color),
                _curves(run),
                _balance(run),
                _optimization(run),
                _skipped(run),
                _configuration(run),
            )
            if section
        ),
    )
    path = run.path / "report.html"
    write_whole(path, page.encode())
    return path


def headline(run: RunData) -> str:
    """How many rewards ended at least two standard errors of the paired change above their start."""
    changes = (run.evaluations[-1]["change"] if run.evaluations else None) or {}
    known = {name: c for name, c in changes.items() if c["mean"] is not None and c["se"] is not None}
    if not known:
        return f"Training on {_word(len(run.rewards))} rewards"
    up = sum(c["mean"] >= 2 * c["se"] and c["mean"] > 0 for c in known.values())
    if len(known) == 1:
        return "The reward rose" if up else "The reward did not clearly rise"
    if up == len(known):
        return "Both rewards rose" if up == 2 else f"All {_word(up)} rewards rose"
    return f"{_word(up).capitalize() if up else 'None'} of {_word(len(known))} rewards rose"


def color(run: RunData, name: str) -> str:
    """The colour of a reward, the same all over the page; ink for what is not a reward."""
    return f"var(--c{run.rewards.index(name) % _COLORS})" if name in run.rewards else "var(--ink)"


def _lead(run: RunData) -> str:
    names = [f'<b style="color:{color(run, name)}">{escape(name)}</b>' for name in run.rewards]
    joined = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    text = f"One policy trained on {joined}. "
    if run.evaluations and run.evaluations[-1]["change"]:
        text += (
            "“Rose” means: on held-out prompts with fixed seeds, the paired change against the untrained policy is at "
            "least two standard errors above zero."
        )
    return text


def _facts(run: RunData) -> str:
    config = run.config
    methods = list(dict.fromkeys(stage.method or config.balance.method for stage in config.stages))
    facts = {
        "Model": f"{config.model.path}, LoRA rank {config.model.lora_rank}",
        "Method": " → ".join(methods or [config.balance.method]),
        "Epochs": f"{run.epochs_done} of {config.run.epochs}",
        "Samples an epoch": f"{config.prompts.groups_per_epoch} prompts × {config.prompts.images_per_prompt}",
        "Seed": str(config.run.seed),
    }
    if run.seconds is not None:
        facts["Sampling and training"] = _duration(run.seconds)
    return "".join(f"<li><b>{escape(k)}</b>{escape(v)}</li>" for k, v in facts.items())


def _summary(run: RunData) -> str:
    if not run.evaluations:
        return ""
    first, last = run.evaluations[0], run.evaluations[-1]
    rows = "".join(_summary_row(run, name, first, last) for name in run.rewards if name in last["rewards"])
    compared = (
        f"epoch {first['epoch']} (hollow) and epoch {last['epoch']} (full, moving average of the weights). ± is one "
        "standard error of the paired change over prompts, and so is the band. Lines run from 0 to 1, "
        "or around the two values where they lie outside."
        if last["change"]
        else f"so far only epoch {last['epoch']}."
    )
    return (
        "<h2>Before and after</h2>"
        f'<p class="note">Held-out prompts, one picture each with a seed of its own; {compared}</p>'
        '<div class="scroll"><table class="summary"><tr><th>Reward</th><th></th><th>Before</th><th>After</th><th>Change ± SE</th>'
        f"<th>Prompts</th></tr>{rows}</table></div>"
    )


def _summary_row(run: RunData, name: str, first: Row, last: Row) -> str:
    before, after = first["rewards"][name]["mean"], last["rewards"][name]["mean"]
    change = (last["change"] or {}).get(name) or {"mean": None, "se": None, "n": last["rewards"][name]["n"]}
    label = _label(run, name)
    if before is None or after is None:
        return f'<tr><td>{label}</td><td colspan="5">applied to no held-out prompt</td></tr>'
    within = all(0 <= v <= 1 for v in (before, after))
    span = abs(after - before) or abs(before) or 1.0
    low, high = (0.0, 1.0) if within else (min(before, after) - span, max(before, after) + span)
    bar = dumbbell(before, after, change["se"], color(run, name), low, high)
    return (
        f'<tr><td>{label}</td><td class="wide">{bar}</td><td>{before:.3f}</td><td>{after:.3f}</td>'
        f"<td>{_change(change)}</td><td>{change['n']}</td></tr>"
    )


def _change(change: Row) -> str:
    mean, error = change["mean"], change["se"]
    if mean is None:
        return "–"
    clear = error is not None and abs(mean) >= 2 * error
    tone = ("up" if mean > 0 else "down") if clear else ""
    sign = "+" if mean >= 0 else "−"
    after = "" if error is None else f' <span class="error">± {error:.3f}</span>'
    return f'<span class="change {tone}">{sign}{abs(mean):.3f}</span>{after}'


def _curves(run: RunData) -> str:
    if not run.train:
        return ""
    window = max(1, len(run.train) // 20) | 1
    panels = []
    for name in run.rewards:
        raw = run.named("rewards", name)
        evaluations = [(e["step"], e["rewards"][name]["mean"]) for e in run.evaluations if name in e["rewards"]]
        errors = [e["rewards"][name]["se"] for e in run.evaluations if name in e["rewards"]]
        series = [
            Series("", thinned(raw), color(run, name), "faint"),
            Series("", thinned(running_mean(raw, window)), color(run, name)),
            Series("", evaluations, "var(--ink)", "dots", errors),
        ]
        panels.append(line_chart(series, title=name, marks=run.stage_marks))
    return (
        "<h2>Rewards during training</h2>"
        '<p class="note">Training samples come from the old policy on fresh prompts; held-out scores from the moving '
        "average of the trained weights on fixed ones. Horizontal: optimizer steps.</p>"
        '<div class="key"><span class="raw">mean over the samples of a step</span>'
        f'<span class="smooth">running mean of {window} steps</span>'
        '<span class="held">held-out prompts ± SE</span></div>'
        f'<div class="panels">{"".join(panels)}</div>'
    )


def _balance(run: RunData) -> str:
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
        f'<div class="panels broad">{"".join(charts)}</div>{_conflicts(run)}'
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


def _conflicts(run: RunData) -> str:
    names = run.objectives
    pairs = {(a, b): run.mean_conflict(a, b) for a in names for b in names if a != b}
    if all(value is None for value in pairs.values()):
        return ""
    head = "".join(f'<th style="color:{color(run, name)}">{escape(name)}</th>' for name in names[:-1])
    body = ""
    for i, a in enumerate(names[1:], start=1):
        body += f'<tr><th style="color:{color(run, a)}">{escape(a)}</th>'
        body += "".join(_heat_cell(pairs[a, b]) for b in names[:i]) + "</tr>"
    return (
        "<h3>Which rewards pull together, which apart</h3>"
        '<p class="note">Mean cosine between two rewards’ gradients over the steps that collected them. Batch noise '
        "draws these numbers towards zero.</p>"
        f'<div class="scroll"><table class="heat"><tr><th></th>{head}</tr>{body}</table></div>'
    )


def _heat_cell(value: float | None) -> str:
    if value is None:
        return "<td>–</td>"
    base, share = "var(--agree)" if value >= 0 else "var(--pull)", round(min(1.0, abs(value)) * 75)
    return f'<td style="background:color-mix(in srgb, {base} {share}%, var(--card))">{number(round(value, 2))}</td>'


def _optimization(run: RunData) -> str:
    fields = {
        "lr": "Learning rate",
        "grad_norm": "Norm of the balanced gradient, before clipping",
        "loss": "Denoising loss, mean of (L⁺ + L⁻)/2",
        "kl": "Distance to the untrained model (KL term)",
        "old_decay": "Decay of the old policy",
    }
    charts = []
    for field, title in fields.items():
        points = run.series(lambda row, field=field: row.get(field))  # type: ignore[misc]
        known = [y for _, y in points if y is not None]
        if not known or (field == "kl" and not any(known)):
            continue
        window = max(1, len(points) // 20) | 1 if field in ("grad_norm", "loss") else 1
        series = [Series("", thinned(running_mean(points, window)), "var(--ink)")]
        if window > 1:
            series.insert(0, Series("", thinned(points), "var(--ink)", "faint"))
        charts.append(line_chart(series, title=title, zero=field in ("lr", "old_decay"), marks=run.stage_marks))
    return f'<h2>Optimization</h2><div class="panels">{"".join(charts)}</div>' if charts else ""


def _skipped(run: RunData) -> str:
    if not run.train:
        return ""
    steps = len(run.train)
    rows = ""
    for name in run.rewards:
        inactive = sum(name in row.get("inactive", []) for row in run.train)
        cells = (
            f"{run.count('valid', name) / steps:.1f}",
            run.count("masked_errors", name),
            run.count("degenerate_groups", name),
            inactive,
        )
        rows += f"<tr><td>{_label(run, name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return (
        "<h2>What was left out</h2>"
        '<p class="note">A reward has no value where it does not apply. A prompt group whose pictures all score the '
        "same has no advantage to learn from. A reward without any signal on a step is inactive there.</p>"
        '<div class="scroll"><table><tr><th>Reward</th><th>Samples it applies to, per step</th><th>Masked errors</th>'
        f"<th>Groups without spread</th><th>Inactive steps of {steps}</th></tr>{rows}</table></div>"
    )


def _configuration(run: RunData) -> str:
    return (
        "<h2>Configuration</h2><details><summary>config.yaml, defaults included</summary>"
        f"<pre>{escape(run.config.to_yaml())}</pre></details>"
    )


def _label(run: RunData, name: str) -> str:
    dot = f'<span class="dot" style="background:{color(run, name)}"></span>'
    return f'{dot}<span class="name">{escape(name)}</span>'


def _known(values: dict[str, float | None]) -> list[float]:
    return [value for value in values.values() if value is not None]


def _word(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else str(count)


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{hours:.1f} h"
