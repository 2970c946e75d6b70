"""Compare finished runs: ``python -m gradbalance_diffusers.summarize RUN [RUN ...] [--picture FILE.png]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .figures import image_grid
from .report_data import read_run

LABEL = 64


def summary_table(runs: Sequence[str | Path]) -> str:
    """A Markdown table: per run the paired change of every reward on the held-out prompts, ± one standard error.

    Args:
        runs: Folders of runs with at least two evaluations. The untrained scores are those of the first.

    Returns:
        One line per run, headed by the scores of the untrained policy.
    """
    data = [read_run(run) for run in runs]
    names = data[0].rewards
    before = data[0].evaluations[0]["rewards"]
    lines = [
        "| run | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        "| untrained | " + " | ".join(f"{before[name]['mean']:.3f}" for name in names) + " |",
    ]
    for run in data:
        change = run.evaluations[-1]["change"]
        cells = [f"{change[name]['mean']:+.3f} ± {change[name]['se']:.3f}" for name in names]
        lines.append(f"| {run.path.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def before_after(run: str | Path, sources: Sequence[str] = ("ocr", "geneval"), count: int = 5) -> Image.Image:
    """The first ``count`` kept pictures of each source, untrained above trained, from the same noise."""
    folder = Path(run) / "evaluations"
    first, last = (sorted(folder.glob("epoch-*.json"))[place] for place in (0, -1))
    record = json.loads(last.read_text("utf-8"))
    kept = [i for source in sources for i in [j for j in record["grid"] if _source(record, j) == source][:count]]
    rows = [[Image.open(file.with_suffix("") / f"{i:03d}.png") for i in kept] for file in (first, last)]
    captions = [_short(record["prompts"][i]["prompt"]) for i in kept]
    scale = max(1, 128 // rows[0][0].width)
    grid = image_grid(rows[0] + rows[1], len(kept), scale, [""] * len(kept) + captions)
    page = Image.new("RGB", (grid.width + LABEL, grid.height), "white")
    page.paste(grid, (LABEL, 0))
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    for row, label in enumerate(("before", "after")):
        draw.text((8, int((row + 0.45) * grid.height / 2)), label, "#333333", font)
    return page


def _source(record: dict, index: int) -> str:
    return str(record["prompts"][index]["source"])


def _short(prompt: str) -> str:
    """What is asked for, without the background."""
    quoted = prompt.split('"')
    return f'"{quoted[1]}"' if len(quoted) > 2 else prompt.rsplit(" on a ", 1)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, print the table, write the picture if one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m gradbalance_diffusers.summarize", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--picture", type=Path, help="PNG with pictures of the first run before and after training")
    options = parser.parse_args(arguments)
    print(summary_table(options.runs))
    if options.picture:
        before_after(options.runs[0]).save(options.picture)


if __name__ == "__main__":
    main()
