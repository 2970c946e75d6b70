"""``python -m benchmarks [solvers] [step] [harmonize] [ddp] [trl] [--quick]``: run them all, or those named."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec

import torch

NAMES = ("solvers", "step", "harmonize", "ddp", "trl")
NEEDED = {
    "torchjd": "torchjd[full]==0.18.*",
    "cvxpy": "torchjd[full]==0.18.*",
    "diffusers": "gradbalance[diffusers]",
    "trl": "gradbalance[trl]",
}


def main(arguments: list[str]) -> None:
    """Run the benchmarks and write what they found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which of {', '.join(NAMES)}; all if left out")
    parser.add_argument("--quick", action="store_true", help="tiny settings, printed and not written: does it run?")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}.")
    missing = sorted({package for name, package in NEEDED.items() if find_spec(name) is None})
    if missing:
        parser.error(f"the benchmarks need {' '.join(missing)}: pip install {' '.join(repr(name) for name in missing)}")
    torch.set_num_threads(1)
    for name in options.names or NAMES:
        load = os.getloadavg()[0]
        print(f"{name} (load average {load:.2f})", flush=True)
        result = import_module(f"benchmarks.{name}").run(options.quick)
        result.show()
        if not options.quick:
            result.publish(load)


if __name__ == "__main__":
    main(sys.argv[1:])
