"""``python -m benchmarks.evidence [name ...] [--seeds 5] [--quick]``: the experiments of docs/results.md.

Finished parts are kept under ``--folder`` and not run again: stop it at any time and start it again.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.evidence.store import Store
from benchmarks.report import ROOT

NAMES = ("multitask", "harmony", "corrections", "noise", "learning", "conflict", "units", "ablations", "cost")
PAGE = ROOT / "docs" / "results.md"


def main(arguments: list[str]) -> None:
    """Run the experiments named and write what they found into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which of {', '.join(NAMES)}; all if left out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="training runs side by side")
    parser.add_argument("--quick", action="store_true", help="tiny settings, printed and not written: does it run?")
    parser.add_argument("--folder", type=Path, default=None, help="finished parts; runs/evidence if left out")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no experiment is called {', '.join(unknown)}; there are {', '.join(NAMES)}.")
    # Quick results must never be taken for real ones.
    folder = options.folder or Path("runs/evidence-quick" if options.quick else "runs/evidence")
    for name in options.names or NAMES:
        load = os.getloadavg()[0]
        experiment = import_module(f"benchmarks.evidence.{name}")
        result = experiment.run(Store(folder), seeds=options.seeds, workers=options.workers, quick=options.quick)
        result.show()
        if not options.quick:
            result.publish(load, page=PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
