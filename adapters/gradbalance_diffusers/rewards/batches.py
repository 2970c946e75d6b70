"""Micro-batches: how many pictures a model sees at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


def check_batch_size(batch_size: int) -> int:
    """``batch_size`` itself.

    Raises:
        InvalidArgumentError: It is not a positive integer.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidArgumentError(f"`batch_size` must be a positive integer. Found {batch_size!r}.")
    return batch_size


def in_batches(
    score: Callable[[Tensor, list[str]], Tensor], images: Tensor, prompts: list[str], batch_size: int
) -> list[float]:
    """The scores of ``score``, called with at most ``batch_size`` pictures and their prompts at a time.

    >>> in_batches(lambda images, prompts: images.mean(dim=(1, 2, 3)), torch.ones(3, 3, 2, 2), ["", "", ""], 2)
    [1.0, 1.0, 1.0]

    Raises:
        InvalidArgumentError: Another number of prompts than of pictures.
    """
    if len(prompts) != len(images):  # a single prompt would be broadcast
        raise InvalidArgumentError(
            f"`prompts` must have one entry per picture. Found {len(images)} pictures and {len(prompts)} prompts."
        )
    starts = range(0, len(images), batch_size)
    parts = [score(images[i : i + batch_size], prompts[i : i + batch_size]) for i in starts]
    return torch.cat(parts).cpu().tolist() if parts else []
