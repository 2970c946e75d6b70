"""Full harmonization of K rewards on an SD3 transformer with LoRA: the cost of K + 1 passes, of three and of two.

Run ``python -m benchmarks harmonize``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

import gradbalance as gb
from benchmarks.memory import peak_bytes, tensor_bytes
from benchmarks.nft_step import TrainingStep
from benchmarks.report import COLORS, Result, Table, figure, mebibytes
from benchmarks.timing import take_turns

COUNTS = (2, 5, 8, 16, 32)
BASELINE = "one backward"
COLLECTORS: tuple[Literal["linear", "passes"], ...] = ("linear", "passes")
PASSES = {"K + 1 passes": None, "linear": 3, "linear, centered": 2, "cached": 1}
COLLECTING = ("K + 1 passes", "linear", "linear, centered")
STYLES = {
    "K + 1 passes": (COLORS["passes"], "s-", "K + 1 passes"),
    "linear": (COLORS["gradbalance"], "o-", "linear: L⁺, L⁻, KL"),
    "linear, centered": (COLORS["centered"], "^-", "linear, centered: D, common + KL"),
    "cached": (COLORS["baseline"], "d--", "cached weights (between refreshes)"),
}


def run(quick: bool) -> Result:
    """Measure everything."""
    counts = (2, 5) if quick else COUNTS
    training = TrainingStep(layers=2, heads=2, batch=2) if quick else TrainingStep(layers=6, heads=8, batch=8)
    rows = [row for count in counts for row in _measured(training, count, 2 if quick else 3)]
    settings = training.settings | {"K": counts}
    return Result(
        "harmonize",
        settings,
        rows,
        [_speed_table(rows, counts), _memory_table(rows, counts)],
        _notes(settings, rows),
        {"benchmark-harmonize": _figure(rows, counts)},
    )


def candidates(training: TrainingStep, count: int) -> dict[str, Callable[[], object]]:
    """Training steps with K = ``count`` rewards, by name."""
    r = _optimality(training, count)
    # A refresh at every step, and one for ever.
    cached = gb.MARBLE(interval=10**9)
    training.balanced(r, cached, "passes")
    return {
        BASELINE: partial(training.weighted_sum, r),
        "K + 1 passes": partial(training.balanced, r, gb.MARBLE(interval=1), "passes"),
        "linear": partial(training.balanced, r, gb.MARBLE(interval=1), "linear"),
        "linear, centered": partial(training.balanced, r, gb.MARBLE(interval=1), "linear", center=True),
        "cached": partial(training.balanced, r, cached, None),
        "forward only": training.forward,
    }


def _measured(training: TrainingStep, count: int, rounds: int) -> list[dict[str, Any]]:
    steps = candidates(training, count)
    timings = take_turns(steps, baseline=BASELINE, rounds=rounds)
    # Parameters are there before the step; so are their two Adam moments in a real run, which would only dilute ratios.
    held = tensor_bytes(list(training.transformer.parameters()))
    forward = timings["forward only"].ratio
    found = []
    for name, step in steps.items():
        training.clear()
        row = {"K": count, "method": name, **asdict(timings[name]), "peak": held + peak_bytes(step)}
        row["rows"] = count * tensor_bytes(training.parameters) if name in COLLECTING else 0
        passes = count + 1 if name == "K + 1 passes" else PASSES.get(name)
        if passes is not None:
            # With F forwards and B for a backward pass, passes cost F + passes B where the baseline costs F + B.
            row["bound"] = 1 / (forward + passes * (1 - forward))
        if name == "linear":
            row["error"] = _disagreement(training, count)
        found.append(row)
    print(".", end="", flush=True)
    return found


def _disagreement(training: TrainingStep, count: int) -> float:
    """Relative difference between `linear` and `passes` in one combination of the rows, with weights of both signs.

    Not in the balanced gradient: its weights magnify rounding where rows are nearly parallel.
    """
    weights = torch.linspace(-1, 1, count, dtype=torch.float64)
    r = _optimality(training, count)
    gradients = []
    for collector in COLLECTORS:
        training.balanced(r, lambda gram: weights, collector)
        gradients.append(torch.cat([p.grad.reshape(-1) for p in training.parameters if p.grad is not None]))
    found, expected = gradients
    return float((found - expected).norm() / expected.norm())


def _optimality(training: TrainingStep, count: int) -> Tensor:
    return torch.rand(training.batch, count, generator=torch.Generator().manual_seed(count))


def _speed_table(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> Table:
    lines = []
    for count in counts:
        by_name = {row["method"]: row for row in rows if row["K"] == count}
        line = [str(count), f"{by_name[BASELINE]['seconds']:.2f}"]
        for name in PASSES:
            row = by_name[name]
            line.append(f"{1 / row['ratio']:.2f} [{1 / row['high']:.2f}, {1 / row['low']:.2f}] of {row['bound']:.2f}")
        lines.append([*line, f"{by_name['linear']['error']:.0e}"])
    columns = ["K", "one backward, CPU s", *PASSES, "error of linear"]
    return Table("Speed of the training part of a step, relative to one backward pass", columns, lines)


def _memory_table(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> Table:
    lines = []
    for count in counts:
        by_name = {row["method"]: row for row in rows if row["K"] == count}
        base = by_name[BASELINE]["peak"]
        line = [str(count), mebibytes(base), mebibytes(by_name["linear"]["rows"])]
        for name in PASSES:
            row = by_name[name]
            apart = f", {(row['peak'] - row['rows']) / base:.3f}× without rows" if row["rows"] else ""
            line.append(f"{mebibytes(row['peak'])} ({row['peak'] / base:.3f}×{apart})")
        lines.append(line)
    return Table("Peak memory, MiB", ["K", "one backward", "rows", *PASSES], lines)


def _notes(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    forward = [row["ratio"] for row in rows if row["method"] == "forward only"]
    return [
        f"SD3 transformer of diffusers with {settings['parameters'] / 1e6:.1f} M parameters, random weights, LoRA "
        f"rank {settings['rank']} on the attention projections of both streams "
        f"({settings['trainable'] / 1e6:.2f} M trainable), batch {settings['batch']}, {settings['tokens']} tokens, "
        "float32.",
        "The training part of a step: predictions of the old and of the reference policy without gradients, that of "
        "the trained policy with, the loss, and everything up to `.grad`. “One backward” is DiffusionNFT on the mean "
        "of the rewards: one loss, one backward pass, no gradbalance. All others add the KL term outside the "
        "balancing.",
        "Speed is time of “one backward” over own time in the same round: median and quartiles. “of” gives what the "
        f"number of backward passes alone allows, F + B against F + n·B; the three forwards F are "
        f"{sum(forward) / len(forward):.2f} of the step.",
        "“linear” makes three passes (L⁺, L⁻, KL), centered two (L⁺ − L⁻; common + KL), K + 1 passes what they say; "
        "“cached” is every step of MARBLE between two refreshes. Error: difference between linear and K "
        "passes in one combination of the rows, relative.",
        "Peak memory: tensors alive at once, from the events of torch's allocator, parameters included. "
        "The rows are K gradients of the trainable parameters in float32; their share falls as batch, resolution and "
        "model grow.",
    ]


def _figure(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> Figure:
    result, axes = figure(2, height=3.4)
    speed, memory = axes[0]
    for name, (color, style, label) in STYLES.items():
        own = [row for row in rows if row["method"] == name]
        base = [row["peak"] for row in rows if row["method"] == BASELINE]
        speed.plot(counts, [1 / row["ratio"] for row in own], style, color=color, label=label)
        speed.plot(counts, [row["bound"] for row in own], ":", color=color, linewidth=1)
        memory.plot(counts, [row["peak"] / b for row, b in zip(own, base, strict=True)], style, color=color)
    speed.plot([], [], ":", color="gray", linewidth=1, label="allowed by the number of passes")
    for axis in (speed, memory):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_xlabel("rewards K")
    speed.set_ylim(0, 1.1)
    speed.set_title("speed, × one backward")
    result.legend(fontsize=7.5, loc="outside lower center", ncols=3)
    memory.set_ylim(0.95, max(1.1, math.ceil(10 * memory.get_ylim()[1]) / 10))
    memory.set_title("peak memory, × one backward")
    return result
