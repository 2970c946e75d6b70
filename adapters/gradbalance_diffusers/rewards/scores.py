"""The one place where what a reward returns becomes numbers."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


class LostScore(float):
    """A score that should exist and was lost: NaN, with the reason.

    A reward returns it for single samples that it could not score (a server that was away, an answer that cannot be
    read) when it is to go on without them. A :class:`RewardSet` masks the sample as it does for NaN, and warns and
    counts it in the table's ``errors``, which it does not do for None and NaN (the reward does not apply).

    >>> LostScore("no answer"), LostScore("no answer").reason
    (nan, 'no answer')
    """

    reason: str

    def __new__(cls, reason: str) -> LostScore:
        """NaN, whatever the reason."""
        score = super().__new__(cls, math.nan)
        score.reason = reason
        return score

    def __reduce__(self) -> tuple[type[LostScore], tuple[str]]:
        return LostScore, (self.reason,)


def lost_scores(returned: Any) -> dict[int, str]:
    """Reasons of the lost scores in what a reward returned, by sample.

    >>> lost_scores([0.5, LostScore("timeout"), None])
    {1: 'timeout'}
    """
    if isinstance(returned, Tensor):
        return {}
    return {i: entry.reason for i, entry in enumerate(returned) if isinstance(entry, LostScore)}


def check_scores(name: str, returned: Any, size: int) -> Tensor:
    """What reward ``name`` returned for ``size`` samples, as ``[size]`` float64 on the CPU, NaN where missing.

    Half precision and integers are promoted. Nothing is broadcast or cut.

    Raises:
        InvalidArgumentError: Wrong length or shape, an entry that is no number, or Inf; names reward and sample.

    >>> check_scores("ocr", [1, None, 0.5], 3)
    tensor([1.0000, nan, 0.5000], dtype=torch.float64)
    """
    shape = getattr(returned, "shape", None)
    if shape is not None and tuple(shape) != (size,):
        raise InvalidArgumentError(
            f"Reward {name!r} must return one score per sample, shape ({size},). Found shape {tuple(shape)}."
        )
    if isinstance(returned, Tensor):
        returned = returned.detach().cpu()
    if isinstance(returned, str) or not hasattr(returned, "__len__"):
        raise InvalidArgumentError(
            f"Reward {name!r} must return a sequence of {size} scores. Found {type(returned).__name__}."
        )
    if len(returned) != size:
        raise InvalidArgumentError(
            f"Reward {name!r} must return one score per sample, {size} in all. Found {len(returned)}."
        )
    return torch.tensor([_number(name, i, entry) for i, entry in enumerate(returned)], dtype=torch.float64)


def _number(name: str, sample: int, entry: Any) -> float:
    if entry is None:
        return math.nan
    if hasattr(entry, "item") and getattr(entry, "shape", None) == ():  # a scalar of torch or numpy
        entry = entry.item()
    if not isinstance(entry, Real) or math.isinf(entry):
        raise InvalidArgumentError(
            f"Reward {name!r} must return finite numbers, or None or NaN where it does not apply. "
            f"Found {entry!r} for sample {sample}."
        )
    return float(entry)
