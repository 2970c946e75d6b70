"""Where results go: a table on the terminal, a JSON file, a picture, and the page docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "benchmarks.md"
PACKAGES = ("torch", "numpy", "scipy", "quadprog", "torchjd", "cvxpy", "ecos", "diffusers", "peft", "trl")

COLORS = {
    "gradbalance": "#0b6e99",
    "TorchJD": "#d1495b",
    "SLSQP": "#8a6fb0",
    "quadprog": "#8d99ae",
    "UPGrad": "#edae49",
    "passes": "#d1495b",
    "baseline": "#30343f",
    "centered": "#3fa34d",
}


@dataclass(frozen=True)
class Table:
    """A table of strings, for terminal and page alike."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        widths = [max(len(cell) for cell in column) for column in zip(self.columns, *self.rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in self._all()]
        return "\n".join([f"\n{self.title}", *lines])

    def _all(self) -> list[Sequence[str]]:
        return [self.columns, *self.rows]

    def markdown(self) -> str:
        """The table in Markdown under its title."""
        lines = ["| " + " | ".join(row) + " |" for row in self._all()]
        lines.insert(1, "|" + " ---: |" * len(self.columns))
        return "\n".join([f"**{self.title}**", "", *lines])


@dataclass(frozen=True)
class Result:
    """What one benchmark found.

    Attributes:
        name: Of the benchmark: of its JSON file and of its place in the page.
        settings: What was measured, plain values.
        rows: Measurements, one dict of plain values each.
        tables: The same for readers.
        notes: Sentences under the tables.
        figures: File stem -> figure.
    """

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    tables: list[Table]
    notes: list[str]
    figures: dict[str, Figure]

    def show(self) -> None:
        """Print tables and notes."""
        for table in self.tables:
            print(table)
        print("\n" + "\n".join(self.notes))

    def publish(self, load: float, page: Path = PAGE) -> None:
        """Write JSON and figures, and refresh this benchmark's part of a page.

        Args:
            load: Load average of the machine before the benchmark began.
            page: Markdown file with a pair of markers for this benchmark.
        """
        for folder in (RESULTS, IMAGES):
            folder.mkdir(parents=True, exist_ok=True)
        about = {"benchmark": self.name, "machine": machine(load), "settings": self.settings, "results": self.rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for stem, figure in self.figures.items():
            figure.savefig(IMAGES / f"{stem}.png", dpi=144)
            plt.close(figure)
        text = page.read_text(encoding="utf-8")
        page.write_text(refreshed(text, self.name, self._section(about["machine"])), encoding="utf-8")

    def _section(self, machine: dict[str, Any]) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
        about = (
            f"*{machine['time']}, {machine['cpu']}, one thread of {machine['cores']}, load before the start "
            f"{machine['load']:.2f}; Python {machine['python']}, {packages}.*"
        )
        pictures = [f"![{stem}](images/{stem}.png)" for stem in self.figures]
        notes = [f"* {note}" for note in self.notes]
        return "\n\n".join([about, *pictures, *(table.markdown() for table in self.tables), "\n".join(notes)])


def refreshed(page: str, name: str, text: str) -> str:
    """The page with the text between the markers of ``name`` replaced.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page must hold the markers {begin} and {end}, found none; put them back.")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page)


def machine(load: float) -> dict[str, Any]:
    """What the numbers depend on: processor, versions, and how busy the machine was."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "load": load,
        "python": platform.python_version(),
        "packages": packages,
    }


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def figure(columns: int, rows: int = 1, *, height: float = 3.1) -> tuple[Figure, Any]:
    """An empty figure in the style of the page, and its axes as an array [rows, columns]."""
    plt.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False, "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 4,
    })  # fmt: skip
    return plt.subplots(rows, columns, figsize=(3.6 * columns, height * rows), squeeze=False, layout="constrained")


def microseconds(seconds: float) -> str:
    """Microseconds for reading."""
    return f"{seconds * 1e6:,.0f}"


def times(ratio: float) -> str:
    """A ratio for reading: three digits, or as many as it has before the point."""
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}×"


def mebibytes(count: float) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:,.1f}"
