"""Two rows, in plain numbers: numpy takes longer to begin than the whole of this takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradbalance.solvers.correlation import Array, Correlation, Precision
from gradbalance.solvers.solution import SMALL, STATIONARY


class Pair(NamedTuple):
    """Two rows: their norms, and the cosine between them in [-1, 1]; 0 beside a zero row."""

    first: float
    second: float
    cosine: float


def pair_of(full: Array, precision: Precision) -> Pair | None:
    """The two rows of a 2 x 2 Gramian in which nothing is wrong or zero; None for all others.

    Args:
        full: The Gramian, float64.
        precision: That of the Gramian.
    """
    if full.shape != (2, 2):
        return None
    (one, product), (mirrored, other) = full.tolist()
    if product != mirrored or not (precision.smallest <= one < math.inf and precision.smallest <= other < math.inf):
        return None
    first, second = math.sqrt(one), math.sqrt(other)
    cosine = product / (first * second)
    # Not `abs(cosine) > 1`: NaN has to end up here too. Beyond 1 by rounding or more, correlation() decides.
    return Pair(first, second, cosine) if abs(cosine) <= 1.0 else None


def pair_from(rows: Correlation) -> Pair:
    """The two rows of a correlation with K = 2."""
    first, second = rows.norms.tolist()
    return Pair(first, second, float(rows.matrix[0, 1]))


def shortest(pair: Pair, floor: float) -> tuple[float, float]:
    """Closed form of ``min_norm`` for K = 2: the minimizer on the line, clipped, which is exact in one dimension.

    The first weight is <g_2, g_2 - g_1> / |g_2 - g_1|^2; each is computed by itself, in lengths relative to the shorter
    row.
    """
    first, second, cosine = pair
    left = right = 0.5
    if min(first, second) == 0.0 < max(first, second):
        left, right = float(first == 0.0), float(second == 0.0)
    elif first > 0.0:
        v, w = min(1.0, second / first), min(1.0, first / second)
        # Rows equal to rounding share: what is left of their differences is noise.
        if max(1.0 - cosine, abs(v - w)) > 1e-12:
            left, right = max(v * (v - cosine * w), 0.0), max(w * (w - cosine * v), 0.0)
            left, right = left / (left + right), right / (left + right)
    # Neither is had as 1 minus the other, which would round a small weight to 1e-16.
    if left < floor:
        return floor, 1.0 - floor
    return (1.0 - floor, floor) if right < floor else (left, right)


def certificate(pair: Pair, weights: tuple[float, float], floor: float) -> tuple[float, bool]:
    """``Solution.gap`` and ``Solution.stationary`` of weights on two rows that are not zero."""
    left, right = weights
    longest = max(pair.first, pair.second)
    first, second = pair.first / longest, pair.second / longest
    total = left * first + right * second
    if total == 0.0:
        return 0.0, True
    share, other = left * first / total, right * second / total
    slope, other_slope = share + pair.cosine * other, pair.cosine * share + other
    squared = share * slope + other * other_slope
    ratio, other_ratio = first / total, second / total
    product, other_product = ratio * slope, other_ratio * other_slope
    mean = squared
    if floor != 0.0:
        mean = (left - floor) * product + (right - floor) * other_product
        rest = 1.0 - 2.0 * floor
        product, other_product = rest * product, rest * other_product
    violation = max((mean - product) / max(ratio, 1.0), (mean - other_product) / max(other_ratio, 1.0))
    return max(violation / max(squared, SMALL), 0.0), squared <= STATIONARY
