"""Peak memory of a call, from every allocation that torch's CPU allocator makes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Largest number of tensor bytes alive at a time during ``call``, above those alive before it.

    Counted from the allocator's events, not from the resident set of the process: exact, repeatable to the byte, and
    blind to what is no tensor (Python objects, scratch memory of BLAS) and to what the C allocator keeps in reserve.
    """
    gc.collect()
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that the profiler prints at every start and stop, past Python's own streams."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def tensor_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes that tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
