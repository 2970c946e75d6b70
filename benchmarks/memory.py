"""Peak memory of a call, from every allocation that torch's CPU allocator makes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Largest number of tensor bytes alive at a time during ``call``, above those alive before it.

    Counted from the allocator's events, not from the resident set of the process: exact, repeatable to the byte, and
    blind to what is no tensor (Python objects, scratch memory of BLAS) and to what the C allocator keeps in reserve.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def tensor_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes that tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
