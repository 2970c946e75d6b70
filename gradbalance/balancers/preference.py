"""Priorities of objectives: checked as an argument, and fitted to the rows of a call."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gradbalance.errors import InvalidArgumentError


def checked_preference(preference: Iterable[float] | None) -> tuple[float, ...] | None:
    """Return priorities as floats, refusing what cannot be one.

    Raises:
        InvalidArgumentError: Not numbers, none, or one that is not finite and > 0.
    """
    if preference is None:
        return None
    try:
        values = tuple(float(value) for value in preference)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"`preference` should be one number > 0 per objective, or None. Found {preference!r}."
        ) from error
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise InvalidArgumentError(
            f"`preference` should hold finite numbers > 0, one per objective. Found {list(values)}. To leave an "
            "objective out of the balancing, do not hand over its loss."
        )
    return values


def priorities_for(preference: tuple[float, ...] | None, count: int) -> NDArray[np.float64] | None:
    """Return the priorities of ``count`` objectives; None where there is nothing to prefer, all being equal.

    Raises:
        InvalidArgumentError: There are not ``count`` of them.
    """
    if preference is None:
        return None
    if len(preference) != count:
        raise InvalidArgumentError(
            f"`preference` should hold one number per objective. Found {len(preference)} priorities for K = {count}."
        )
    return None if min(preference) == max(preference) else np.array(preference)
