"""Refusing rows that only one of several ranks would see."""

from __future__ import annotations

import torch.distributed as dist

from gradbalance.errors import CollectorError


def require_one_rank() -> None:
    """Raise where a process group of several ranks is running.

    Rows come from ``torch.autograd.grad``, which the gradient reduction of data-parallel wrappers does not see: each
    rank would solve for weights of its own and the models would drift apart without a word.

    Raises:
        CollectorError: There are several ranks.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CollectorError(
            f"rows are not averaged over ranks yet, found a process group of {dist.get_world_size()}: every rank would "
            "balance its own batch and the models would drift apart. Run on one rank, or use Mean or Fixed, which "
            "need no rows."
        )
