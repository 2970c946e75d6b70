"""Paired timing: candidates take turns in the same process, and are compared round by round."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# Seconds. Reading the clock takes microseconds on virtual machines: quick functions are called many times.
_SHORTEST = 2e-3


@dataclass(frozen=True)
class Timing:
    """CPU time of one candidate.

    Attributes:
        seconds: Median over the rounds, per call.
        ratio: Median over the rounds of its time over the baseline's time in the same round.
        low: Lower quartile of these ratios.
        high: Upper quartile.
    """

    seconds: float
    ratio: float
    low: float
    high: float


def take_turns(candidates: Mapping[str, Callable[[], object]], *, baseline: str, rounds: int) -> dict[str, Timing]:
    """Time candidates in turns, in a new random order each round, after one call of each to warm up.

    What slows the machine down for a while (other processes, heat) then hits all of them, and most of it cancels in the
    ratio of two times of one round.

    Args:
        candidates: Functions to call, by name.
        baseline: Name of the one that the others are compared with.
        rounds: How often each has its turn.
    """
    repeats = {name: _repeats(call) for name, call in candidates.items()}
    # What is alive by now (all of torch) stays; looking at it before every turn would take longer than many a turn.
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(_cpu_time(candidates[name], repeats[name]))
    gc.unfreeze()
    base = np.array(times[baseline])
    timings = {}
    for name, measured in times.items():
        low, ratio, high = np.quantile(np.array(measured) / base, [0.25, 0.5, 0.75]).tolist()
        timings[name] = Timing(float(np.median(measured)), ratio, low, high)
    return timings


def _repeats(call: Callable[[], object]) -> int:
    first = _cpu_time(call, 1)
    # The first call may load and allocate what later ones do not.
    again = first if first > 1 else _cpu_time(call, 1)
    return max(1, math.ceil(_SHORTEST / max(again, 1e-7)))


def _cpu_time(call: Callable[[], object], repeats: int) -> float:
    # As timeit does: what one candidate left behind must not be collected at another's expense.
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats
    finally:
        gc.enable()
