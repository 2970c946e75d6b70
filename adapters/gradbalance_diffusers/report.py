"""report.html: one self-contained page that tells what a run did."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from .charts import Series, dumbbell, line_chart
from .report_balance import balance_section
from .report_colors import color, label
from .report_conflicts import conflicts_section
from .report_data import Row, RunData, read_run, running_mean, thinned
from .report_pictures import picture_sections
from .run_folder import write_whole

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_report(run_folder_path: str | Path) -> Path:
    """Write ``report.html`` into the folder of a run, finished or going on.

    The page holds its pictures and charts itself: rewards before and after on held-out prompts, reward curves,
    coefficients, cosines and norms, which rewards conflict, what was skipped, before/after pictures chosen by a stated
    rule, the configuration.

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
        footer="Written by gradbalance from metrics.jsonl and the evaluations of this run.",
        sections="\n".join(
            section
            for section in (
                _summary(run),
                picture_sections(run),
                _curves(run),
                balance_section(run),
                conflicts_section(run),
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
        '<div class="scroll"><table class="summary"><tr><th>Reward</th><th></th><th>Before</th><th>After</th>'
        f"<th>Change ± SE</th><th>Prompts</th></tr>{rows}</table></div>"
    )


def _summary_row(run: RunData, name: str, first: Row, last: Row) -> str:
    before, after = first["rewards"][name]["mean"], last["rewards"][name]["mean"]
    change = (last["change"] or {}).get(name) or {"mean": None, "se": None, "n": last["rewards"][name]["n"]}
    name_cell = label(run, name)
    if before is None or after is None:
        return f'<tr><td>{name_cell}</td><td colspan="5">applied to no held-out prompt</td></tr>'
    within = all(0 <= v <= 1 for v in (before, after))
    span = abs(after - before) or abs(before) or 1.0
    low, high = (0.0, 1.0) if within else (min(before, after) - span, max(before, after) + span)
    bar = dumbbell(before, after, change["se"], color(run, name), low, high)
    return (
        f'<tr><td>{name_cell}</td><td class="wide">{bar}</td><td>{before:.3f}</td><td>{after:.3f}</td>'
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
            f"{run.count('valid', name) / run.epochs_done:.1f}",
            run.count("masked_errors", name),
            run.count("degenerate_groups", name),
            inactive,
        )
        rows += f"<tr><td>{label(run, name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return (
        "<h2>What was left out</h2>"
        '<p class="note">A reward has no value where it does not apply. A prompt group whose pictures all score the '
        "same has no advantage to learn from. A reward without any signal on a step is inactive there.</p>"
        '<div class="scroll"><table><tr><th>Reward</th><th>Samples it applies to, per epoch</th><th>Masked errors</th>'
        f"<th>Groups without spread</th><th>Inactive steps of {steps}</th></tr>{rows}</table></div>"
    )


def _configuration(run: RunData) -> str:
    return (
        "<h2>Configuration</h2><details><summary>config.yaml, defaults included</summary>"
        f"<pre>{escape(run.config.to_yaml())}</pre></details>"
    )


def _word(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else str(count)


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{hours:.1f} h"
