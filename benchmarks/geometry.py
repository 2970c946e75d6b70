"""Pictures of what each balancer does with the same three gradients: ``python -m benchmarks.geometry``.

Two parameters, so that a gradient is an arrow on paper: one objective is loud, one is quiet, one pulls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

import gradbalance as gb
from benchmarks.report import IMAGES, figure

ROWS = torch.tensor([[2.4, -0.3], [-0.7, 0.75], [0.1, 0.35]], dtype=torch.float64)
NAMES = ("loud", "against", "quiet")
COLORS = ("#d1495b", "#edae49", "#3fa34d")
DIRECTION = "#0b6e99"


def cached(amortize: str) -> gb.MARBLE:
    """MARBLE after a refresh on the rows: its weights are those of a cached step."""
    balancer = gb.MARBLE(interval=2, amortize=amortize)
    balancer(gb.gramian([ROWS]))
    balancer.step()
    return balancer


def weights_of(balancer: Any) -> torch.Tensor:
    """Weights on the rows, solved for or cached."""
    return balancer(gb.gramian([ROWS])) if getattr(balancer, "needs_rows", True) else balancer.weights


PICTURES: dict[str, dict[str, Any]] = {
    "mean": {"Mean()": gb.Mean(), "Fixed([0.1, 1, 1])": gb.Fixed([0.1, 1, 1])},
    "mgda": {"MGDA()": gb.MGDA(), "MGDA(normalize=True)": gb.MGDA(normalize=True)},
    "nash-mtl": {"NashMTL()": gb.NashMTL()},
    "marble": {
        "MARBLE(), every step": gb.MARBLE(),
        'cached, amortize="direction"': cached("direction"),
        'cached, amortize="coefficients"': cached("coefficients"),
    },
}


def main() -> None:
    """Draw all of them."""
    for name, balancers in PICTURES.items():
        picture, axes = figure(len(balancers), height=2.1)
        for axis, (title, balancer) in zip(axes[0], balancers.items(), strict=True):
            weights = weights_of(balancer)
            _draw(axis, title, weights.numpy(), hull=name in ("mgda", "marble"), unit=title != "MGDA()")
        picture.savefig(IMAGES / f"geometry-{name}.png", dpi=144, bbox_inches="tight", pad_inches=0.05)
        print(f"docs/images/geometry-{name}.png")


def _draw(axis: Any, title: str, weights: NDArray[np.float64], *, hull: bool, unit: bool) -> None:
    rows = ROWS.numpy()
    direction = weights @ rows
    _shade_what_helps_all(axis, rows)
    if hull:
        corners = rows / np.linalg.norm(rows, axis=1, keepdims=True) if unit else rows
        axis.fill(*corners.T, facecolor="none", edgecolor="0.45", linewidth=1, linestyle=":")
    for row, name, color in zip(rows, NAMES, COLORS, strict=True):
        _arrow(axis, row, color, 1.6)
        # On the side that the direction does not pass.
        side = "right" if row[0] * direction[1] < row[1] * direction[0] else "left"
        offset = (-3 if side == "right" else 3, 4)
        label = axis.annotate(name, row, color=color, fontsize=8, xytext=offset, textcoords="offset points", ha=side)
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    _arrow(axis, direction, DIRECTION, 2.6)
    gains = rows @ direction
    worst = "helps all" if gains.min() >= -1e-9 else f"harms “{NAMES[int(gains.argmin())]}”"
    axis.set_title(f"{title}: {worst}", fontsize=8.5, loc="left")
    axis.set_xlim(-1.45, 2.9)
    axis.set_ylim(-0.85, max(1.35, direction[1] + 0.2))
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    axis.axvline(0, color="0.85", linewidth=0.8, zorder=0)


def _shade_what_helps_all(axis: Any, rows: NDArray[np.float64]) -> None:
    """All directions that have no negative product with a row."""
    angles = np.linspace(-np.pi, np.pi, 3601)
    around = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    good = around[(around @ rows.T >= 0).all(axis=1)]
    if len(good):
        axis.fill(*np.vstack([[0, 0], 4 * good]).T, color=DIRECTION, alpha=0.08, linewidth=0)


def _arrow(axis: Any, to: Sequence[float], color: str, width: float) -> None:
    axis.annotate(
        "", to, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": width, "shrinkA": 0, "shrinkB": 0}
    )


if __name__ == "__main__":
    main()
