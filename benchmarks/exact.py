"""Slow, clear answers in 100 decimal digits, by which the solvers under test are judged. Shares no code with them."""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Matrix: TypeAlias = NDArray[np.object_]

_CONTEXT = Context(prec=100)
_ZERO = Decimal(10) ** -60


def exact_gramian(rows: NDArray[np.float64]) -> Matrix:
    """``rows @ rows.T`` without rounding, to 100 digits: [K, K] of ``Decimal``."""
    with localcontext(_CONTEXT):
        wide = _decimals(rows)
        return wide @ wide.T


def shortest_squared(gram: Matrix) -> Decimal:
    """The smallest ``a' G a`` over the simplex.

    Non-negative least squares on the rows with one more coordinate, 1, to be brought to ``(0, ..., 0, 1)``, by the
    active-set method of Lawson and Hanson (1974, ch. 23): add the index of steepest descent, solve on the support, step
    back where a weight would turn negative. The solution is a multiple of a. The conditions of Karush, Kuhn and Tucker
    are checked at the end, so that the answer does not rest on the method.

    Raises:
        ArithmeticError: The conditions do not hold.

    >>> shortest_squared(exact_gramian(np.diag([1.0, 2.0]))).normalize()
    Decimal('0.8')
    """
    with localcontext(_CONTEXT):
        count, longer = len(gram), gram + 1
        weights, support = np.array([Decimal(0)] * count), []
        for _ in range(20 * count):
            slopes = 1 - longer @ weights
            outside = [j for j in range(count) if j not in support]
            entering = max(outside, key=lambda j: slopes[j], default=None)
            if entering is None or slopes[entering] <= _ZERO:
                break
            weights, support = _descended(longer, weights, [*support, entering])
        simplex = weights / weights.sum()
        products = gram @ simplex
        squared = simplex @ products
        if min(simplex) < 0 or min(products) < squared * (1 - _ZERO):
            raise ArithmeticError("the active-set reference did not reach an optimum.")
        return squared


def _descended(gram: Matrix, weights: Matrix, support: list[int]) -> tuple[Matrix, list[int]]:
    while True:
        target = np.array([Decimal(0)] * len(gram))
        target[support] = solve(gram[np.ix_(support, support)], np.array([Decimal(1)] * len(support)))
        falling = [j for j in support if target[j] <= 0]
        if not falling:
            return target, support
        step = min(weights[j] / (weights[j] - target[j]) for j in falling)
        weights = weights + step * (target - weights)
        support = [j for j in support if not (target[j] <= 0 and weights[j] <= _ZERO)]
        dropped = [j for j in range(len(gram)) if j not in support]
        weights[dropped] = Decimal(0)


def solve(matrix: Matrix, right: Matrix) -> Matrix:
    """Gaussian elimination for a symmetric positive definite matrix of ``Decimal``."""
    with localcontext(_CONTEXT):
        left, right = matrix.copy(), right.copy()
        count = len(right)
        for k in range(count):
            factor = left[k + 1 :, k] / left[k, k]
            left[k + 1 :, k:] -= np.outer(factor, left[k, k:])
            right[k + 1 :] -= factor * right[k]
        for k in reversed(range(count)):
            right[k] = (right[k] - np.sum(left[k, k + 1 :] * right[k + 1 :])) / left[k, k]
        return right


def excess(gram: Matrix, weights: NDArray[Any], optimum: Decimal) -> float:
    """``a' G a / optimum - 1`` for given weights, cut off at 0 and scaled to sum 1 without rounding first."""
    with localcontext(_CONTEXT):
        simplex = np.maximum(_decimals(weights), Decimal(0))
        simplex = simplex / simplex.sum()
        return float(simplex @ gram @ simplex / optimum - 1)


def bargaining_residual(gram: Matrix, weights: NDArray[Any]) -> float:
    """``max_k |a_k (G a)_k - 1|``: 0 for the solution of ``G a = 1/a``."""
    with localcontext(_CONTEXT):
        wide = _decimals(weights)
        return float(max(abs(wide * (gram @ wide) - 1)))


def _decimals(numbers: NDArray[Any]) -> Matrix:
    flat = [Decimal(float(number)) for number in numbers.reshape(-1)]
    return np.array(flat, dtype=object).reshape(numbers.shape)
