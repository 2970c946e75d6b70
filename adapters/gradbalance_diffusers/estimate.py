"""What a run will need, as a table: ``python -m gradbalance_diffusers.estimate --gpu H100 --gpus 8``.

Without weights and without a GPU, for Stable Diffusion 3.5 Medium; a run prints the same table for the model that it
has loaded, before it trains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from gradbalance.errors import GradBalanceError

from .config import PRESETS, Config, load_config
from .memory_estimate import MemoryItem, memory_items, peak_bytes
from .model_shapes import ModelShapes, sd35_medium_shapes
from .time_estimate import GPU_TFLOPS, UTILIZATION, epoch_flops, find_gpu, seconds


def estimate_table(shapes: ModelShapes, config: Config, *, gpu: str | None = None, gpus: int = 1) -> str:
    """Memory of one process and time of an epoch.

    Args:
        shapes: Sizes of the model.
        config: The whole configuration.
        gpu: An entry of :data:`~gradbalance_diffusers.time_estimate.GPU_TFLOPS`; None leaves out times.
        gpus: Processes with one GPU each.
    """
    items = memory_items(shapes, config, gpus)
    unit, size = ("GiB", 2**30) if peak_bytes(items) >= 2**30 else ("MiB", 2**20)
    lines = [f"Estimate for each of {gpus} processes (~: estimated, others counted)" if gpus > 1 else "Estimate"]
    for place in ("device", "host"):
        lines.append(f"  {place} memory, {unit}; not counted: {_NOT_COUNTED[place]}")
        lines += [_memory_line(item, size) for item in items if item.place == place]
        lines.append(f"    {'peak of all phases':44}~{peak_bytes(items, place) / size:8.2f}")
    flops = epoch_flops(shapes, config)
    speed = f", {gpus} x {gpu} at {UTILIZATION:.0%} of their peak" if gpu else ""
    lines.append(f"  an epoch, 10^15 operations{' and minutes' if gpu else ''}{speed}; not counted: reward models")
    for phase, work in [*flops.items(), ("sum", sum(flops.values()))]:
        minutes = f"{seconds(work, gpu, gpus) / 60:9.1f} min" if gpu else ""
        lines.append(f"    {phase:44}~{work / 1e15:8.3g}{minutes}")
    if gpu:
        hours = config.run.epochs * seconds(sum(flops.values()), gpu, gpus) / 3600
        lines.append(f"    {f'the run, {config.run.epochs} epochs':44}~{hours:8.1f} hours")
    return "\n".join(lines)


_NOT_COUNTED = {"device": "reward models there, the CUDA context, fragmentation", "host": "Python and its libraries"}


def _memory_line(item: MemoryItem, size: int) -> str:
    sign = " " if item.exact else "~"
    when = "" if item.phase == "always" else f"  while {_WHILE[item.phase]}"
    return f"    {item.name:44}{sign}{item.bytes / size:8.2f}{when}"


_WHILE = {
    "encoding": "prompts are encoded",
    "sampling": "sampling",
    "decoding": "decoding",
    "training": "training",
    "refresh": "a step collects gradients per reward",
    "evaluation": "evaluating",
}


def present_gpu() -> str | None:
    """The kind of the GPU at hand, if there is one and its speed is known."""
    return find_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(prog="python -m gradbalance_diffusers.estimate", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace a value")
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--preset", choices=PRESETS, default="sd35-medium")
    origin.add_argument("--config", metavar="FILE.yaml")
    parser.add_argument("--gpu", choices=GPU_TFLOPS, default=present_gpu(), help="kind of GPU, for times")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(given.config or given.preset, given.overrides)
    except GradBalanceError as error:
        parser.error(str(error))
    print(estimate_table(sd35_medium_shapes(config.model), config, gpu=given.gpu, gpus=given.gpus))


if __name__ == "__main__":
    main()
