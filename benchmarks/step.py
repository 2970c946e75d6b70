"""Time and memory of a whole multi-task step against the sum of losses and TorchJD.

Run ``python -m benchmarks step``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchjd.aggregation import MGDA
from torchjd.autojac import jac_to_grad, mtl_backward

import gradbalance as gb
from benchmarks.memory import peak_bytes, tensor_bytes
from benchmarks.report import COLORS, Result, Table, figure, mebibytes, times
from benchmarks.timing import take_turns

WIDTHS = (128, 512, 512, 512, 512)
BATCH = 512
ROUNDS = 20
BASELINE = "sum of losses"
REFRESH, AMORTIZED = "gradbalance MARBLE, refresh", "gradbalance MARBLE, amortized"
SHADES = {BASELINE: COLORS["baseline"], "gradbalance": COLORS["gradbalance"], "TorchJD": COLORS["TorchJD"]}


class Model(nn.Module):
    """A trunk of ReLU layers and K linear heads with one output each."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(wide, narrow), nn.ReLU()) for wide, narrow in pairwise(WIDTHS)]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(WIDTHS[-1], 1) for _ in range(heads))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The features of the trunk and K mean squared errors."""
        features = self.trunk(inputs)
        outputs = [head(features).squeeze(1) for head in self.heads]
        return features, [(output - target).square().mean() for output, target in zip(outputs, targets, strict=True)]


def run(quick: bool) -> Result:
    """Measure everything."""
    counts = (5,) if quick else (5, 20)
    rows = [row for count in counts for row in _measured(count, 64 if quick else BATCH, 2 if quick else ROUNDS)]
    return Result(
        "step",
        {"widths": WIDTHS, "batch": BATCH, "K": counts},
        rows,
        [_table(rows, count) for count in counts],
        [
            "A step is zero_grad, forward and backward, with everything written to `.grad`; no optimizer. × is the "
            "median over rounds of the ratio to the sum of losses in the same round, with quartiles.",
            "Peak memory counts the tensors alive at once during the step, from the events of torch's allocator, "
            "parameters and inputs included.",
            f"K exact gradients of {len(WIDTHS) - 1} layers cost K backward passes through the trunk, whoever makes "
            "them: the row “forward + K backward” is (F + K·B) / (F + B), with F and F + B measured as "
            "“forward only” and as the sum of losses.",
            "TorchJD, sequential, is mtl_backward with parallel_chunk_size=1 and jac_to_grad with "
            "optimize_gramian_computation=True, the quickest of its settings on a CPU.",
        ],
        {"benchmark-step": _figure(rows, counts)},
    )


def steps(model: Model, inputs: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
    """One step of each kind, by name."""
    trunk = list(model.trunk.parameters())
    refresh, amortized = gb.MARBLE(interval=1), gb.MARBLE(interval=10**9)

    def plain() -> None:
        model.zero_grad()
        torch.stack(model(inputs, targets)[1]).sum().backward()

    def balanced(balancer: Any, collector: str | None) -> None:
        model.zero_grad()
        info = gb.backward(model(inputs, targets)[1], trunk, balancer)
        if info.collector != collector:
            raise RuntimeError(f"meant to measure {collector}, found {info.collector}: {info.collector_reason}")

    def torchjd(chunk: int | None, gramian_only: bool) -> None:
        model.zero_grad()
        features, losses = model(inputs, targets)
        mtl_backward(losses, features, parallel_chunk_size=chunk)
        jac_to_grad(trunk, MGDA(), optimize_gramian_computation=gramian_only)

    balanced(amortized, "passes")
    return {
        BASELINE: plain,
        "forward only": lambda: model(inputs, targets),
        "gradbalance MGDA": partial(balanced, gb.MGDA(), "passes"),
        REFRESH: partial(balanced, refresh, "passes"),
        AMORTIZED: partial(balanced, amortized, None),
        "TorchJD MGDA": partial(torchjd, None, False),
        "TorchJD MGDA, sequential": partial(torchjd, 1, True),
    }


def _measured(count: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Model(count)
    inputs, targets = torch.randn(batch, WIDTHS[0]), torch.randn(count, batch)
    candidates = steps(model, inputs, targets)
    timings = take_turns(candidates, baseline=BASELINE, rounds=rounds)
    held = tensor_bytes([*model.parameters(), inputs, targets])
    found = []
    for name, step in candidates.items():
        model.zero_grad()
        found.append({"K": count, "method": name, **asdict(timings[name]), "peak": held + peak_bytes(step)})
    forward = timings["forward only"].ratio
    floor = forward + count * (1 - forward)
    return [*found, {"K": count, "method": "forward + K backward", "ratio": floor}]


def _table(rows: Sequence[dict[str, Any]], count: int) -> Table:
    chosen = [row for row in rows if row["K"] == count]
    base = next(row for row in chosen if row["method"] == BASELINE)
    lines = []
    for row in chosen:
        if "seconds" not in row:
            lines.append([row["method"], "", times(row["ratio"]), "", "", ""])
            continue
        quartiles = f"{row['low']:.2f} – {row['high']:.2f}"
        cells = [f"{1e3 * row['seconds']:.1f}", times(row["ratio"]), quartiles, mebibytes(row["peak"])]
        lines.append([row["method"], *cells, times(row["peak"] / base["peak"])])
    columns = ["step", "CPU ms", "time", "quartiles", "peak MiB", "memory"]
    return Table(f"K = {count} heads, trunk {'–'.join(map(str, WIDTHS))}, batch {BATCH}", columns, lines)


def _figure(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> Figure:
    result, axes = figure(2, len(counts), height=2.2)
    for axis_row, count in zip(axes, counts, strict=True):
        chosen = [r for r in rows if r["K"] == count and "peak" in r and r["method"] != "forward only"][::-1]
        base = chosen[-1]
        names = [row["method"] for row in chosen]
        shades = [next(shade for start, shade in SHADES.items() if name.startswith(start)) for name in names]
        bars = [axis_row[0].barh(names, [row["ratio"] for row in chosen], color=shades)]
        bars.append(axis_row[1].barh(names, [row["peak"] / base["peak"] for row in chosen], color=shades))
        for axis, drawn in zip(axis_row, bars, strict=True):
            axis.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
            axis.margins(x=0.14)
            axis.grid(axis="y", visible=False)
        axis_row[1].set_yticklabels([])
        axis_row[0].set_title(f"K = {count}: time, × sum of losses")
        axis_row[1].set_title("peak memory, × sum of losses")
    return result
