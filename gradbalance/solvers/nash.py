"""Nash bargaining weights: the solution of G a = 1/a (the subproblem of Nash-MTL)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.linalg.lapack import dposv, dpotrf

from gradbalance.solvers.correlation import Array, as_float64, nearest_semidefinite, split
from gradbalance.solvers.pair import pair_of
from gradbalance.solvers.solution import Solution

_TOLERANCE = 1e-10
_TARGET = 1e-12  # Newton converges quadratically: aiming lower costs at most one step
_MAX_ITERATIONS = 100
_STATIONARY = 1e-12  # |x|^2 in units of (sum_k a_k n_k)^2
_RIDGE = 1e-6
_USABLE = 1e-3
_APART = 2e-12  # 1 + cosine of two rows: opposite to rounding below


def nash(gram: Any) -> Solution:
    """Weights a > 0 with ``a_k (G a)_k = 1`` for every k.

    They are the unique minimizer of the strictly convex ``1/2 a' G a - sum_k log a_k``. Every objective then gains the
    same relative amount: with ``x = sum_k a_k g_k``, <x, a_k g_k> = 1 for every k, and |x|^2 = K. The size of a_k goes
    with 1 / |g_k| and says nothing about importance.

    Method: with the correlation matrix C and ``a_k = b_k / n_k`` (the problem is exactly equivariant to row norms),
    damped Newton steps ``b <- b (1 + s d)`` with ``(M + I) d = 1 - M 1`` and ``M = diag(b) C diag(b)``; s = 1 once the
    Newton decrement is below 1/4, and 1 / (1 + decrement) before, which suffices because the function is
    self-concordant (Nesterov and Nemirovskii 1994). No eigenvalue of M + I is below 1. Closed form for K = 2.

    A solution exists if and only if 0 is not in the convex hull of the rows. In float64 it can be had to 1e-10 if the
    hull of the unit rows stays further from 0 than about 1e-3 sqrt(K): nearer, a_k (G a)_k is itself rounded to more.

    Args:
        gram: G, shape [K, K]: torch tensor (any floating dtype, any device), numpy array, or nested sequence.

    Returns:
        The solution; ``gap`` is the residual ``max_k |a_k (G a)_k - 1|``, at most 1e-10 where ``found``. Otherwise the
        weights are finite and ``reason`` tells why. At a Pareto-stationary point they solve the problem with 1e-6 added
        to the diagonal of C; a zero row has weight 0 and the others are solved without it.

    Raises:
        InvalidArgumentError: ``gram`` is no Gramian (shape, symmetry, definiteness).
        NonFiniteError: ``gram`` holds NaN or Inf.

    References:
        Navon et al. 2022, Multi-task learning as a bargaining game, arXiv 2202.01017, claim 3.1.

    Example:
        >>> nash([[16.0, 0.0], [0.0, 0.25]]).weights.tolist()
        [0.25, 2.0]
        >>> nash([[1.0, -1.0], [-1.0, 1.0]]).reason
        'Pareto-stationary: 0 is in the convex hull of the rows to rounding, so no solution exists'
    """
    full, precision = as_float64(gram)
    pair = pair_of(full, precision)
    if pair is not None and (angle := 1.0 + pair.cosine) > _APART:
        side = 1.0 / math.sqrt(angle)
        residual = abs(side * (side + pair.cosine * side) - 1.0)
        return _judged(np.array([side, side]), np.array([pair.first, pair.second]), residual, 0, "closed form")
    matrix, norms, rounding = split(full, precision)
    positive = norms > 0.0
    if positive.all():
        return _solve(matrix, norms, rounding)
    kept = np.flatnonzero(positive)
    weights = np.zeros(len(norms))
    iterations = 0
    if kept.size:
        part = _solve(matrix[np.ix_(kept, kept)], norms[kept], rounding)
        weights[kept], iterations = part.weights, part.iterations
    dead = ", ".join(map(str, np.flatnonzero(~positive)))
    return Solution(
        weights, False, 1.0, iterations, "newton", f"zero row(s) {dead}: no solution exists", stationary=True
    )


def _solve(matrix: Array, norms: Array, rounding: float) -> Solution:
    count = len(norms)
    if count <= 2:
        angle = 1.0 + float(matrix[0, 1]) if count == 2 else 1.0
        if angle > _APART:
            point = np.full(count, 1.0 / math.sqrt(angle))
            residual = float(np.abs(point * (matrix @ point) - 1.0).max())
            return _judged(point, norms, residual, 0, "closed form")
        return _regularized(matrix, norms, 0)
    note = ""
    if dpotrf(matrix)[1] != 0:
        matrix, smallest = nearest_semidefinite(matrix, rounding)
        if smallest < -1e-14 * count:
            note = f"negative eigenvalues of the correlation matrix, down to {smallest:.1e}, were raised to 0"
    point, residual, iterations, stationary = _newton(matrix)
    if stationary or not residual <= _USABLE:
        return _regularized(matrix, norms, iterations)
    return _judged(point, norms, residual, iterations, "newton", note)


def _newton(matrix: Array) -> tuple[Array, float, int, bool]:
    """Return the best point, its residual, the iterations, and whether the minimum runs away (0 in the hull)."""
    count = len(matrix)
    point = np.full(count, math.sqrt(count / max(float(matrix.sum()), 1.0)))
    best, best_residual, stalled = point, math.inf, 0
    for iteration in range(_MAX_ITERATIONS):
        scaled = matrix * point
        scaled *= point[:, None]
        product = scaled.sum(axis=1)
        defect = 1.0 - product
        residual = float(max(defect.max(), -defect.min()))
        if residual < best_residual:
            best, best_residual, stalled = point, residual, 0
        else:
            stalled += 1
        if residual <= _TARGET or (stalled >= 3 and best_residual <= _USABLE):
            return best, best_residual, iteration, False
        if product.sum() <= _STATIONARY * point.sum() ** 2:
            return best, best_residual, iteration, True
        scaled.flat[:: count + 1] += 1.0
        _, step, info = dposv(scaled, defect)
        if info != 0:
            return best, best_residual, iteration, True
        decrement = math.sqrt(max(float(defect @ step), 0.0))
        if decrement > 0.25:
            step /= 1.0 + decrement
        point = point * (1.0 + step)
    return best, best_residual, _MAX_ITERATIONS, False


def _regularized(matrix: Array, norms: Array, iterations: int) -> Solution:
    point, _, more, _ = _newton(matrix + _RIDGE * np.eye(len(norms)))
    residual = float(np.abs(point * (matrix @ point) - 1.0).max())
    reason = "Pareto-stationary: 0 is in the convex hull of the rows to rounding, so no solution exists"
    return Solution(point / norms, False, residual, iterations + more, "newton, regularized", reason, stationary=True)


def _judged(point: Array, norms: Array, residual: float, iterations: int, method: str, note: str = "") -> Solution:
    found = residual <= _TOLERANCE
    reason = "" if found else f"nearly Pareto-stationary: rounding limits the residual to {residual:.1e}"
    if note:
        reason = f"{reason}; {note}" if reason else note
    return Solution(point / norms, found, residual, iterations, method, reason)
