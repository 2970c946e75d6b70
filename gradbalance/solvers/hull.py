"""The point nearest to the origin in a convex hull, as a quadratic program on the correlation matrix.

With rows h_k of length m_k and correlation matrix S, substitute ``t_k = b_k v_k``, where ``v_k = min_j m_j / m_k``. The
min-norm problem over the simplex then reads: minimize b' S b over b >= 0 with v' b = 1. Its solution is, up to a
factor, that of

    minimize 1/2 b' S b - v' b                 over b >= 0 (bounded unless 0 is in the hull), and of
    minimize 1/2 b' S b + 1/2 (v' b - 1)^2     over b >= 0 (always bounded),

the second being non-negative least squares with a factor of S above the row v'. Row lengths enter through v only, so
lengths that differ by many orders of magnitude do no harm to the conditioning of S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import quadprog
from scipy.optimize import nnls

from gradbalance.solvers.correlation import Array

# Regularizer of the proximal steps, relative to the unit diagonal: large enough that ties and redundant rows get one
# well-conditioned answer (rounding of 1e-16 moves it by 1e-6), small enough that one or two steps reach the tolerance.
_PROXIMITY = 1e-10
_MAX_STEPS = 20
# Rows whose correlations differ by less are one row: a Gramian over millions of columns rounds equal rows to 1e-13.
_TIE = 1e-12

Gap = Callable[[Array], float]


@lru_cache(maxsize=128)
def _bounds(count: int) -> tuple[Array, Array]:
    return np.eye(count), np.zeros(count)


def positive_definite(matrix: Array, inverse_norms: Array) -> tuple[Array, int] | None:
    """Solve the first form by the dual active-set method of Goldfarb and Idnani (1983, Math. Programming 27).

    Args:
        matrix: S, shape [K, K].
        inverse_norms: v, shape [K], the largest being 1.

    Returns:
        t on the simplex and the iteration count; None where S is not positive definite to rounding, has rows that are
        equal to rounding, or the optimum is out of reach (0 nearly in the hull).
    """
    # Equal rows can slip through the Cholesky factorization by rounding, and then get arbitrary, unequal weights.
    if np.count_nonzero(matrix > 1 - _TIE) > len(matrix):
        return None
    identity, zeros = _bounds(len(matrix))
    try:
        result = quadprog.solve_qp(matrix, inverse_norms, identity, zeros)
    except ValueError:
        return None
    weights = _simplex(result[0], inverse_norms)
    return None if weights is None else (weights, int(result[3][0]))


def semidefinite(matrix: Array, inverse_norms: Array, gap: Gap, tolerance: float) -> tuple[Array, int, str]:
    """Solve the second form where S may be singular: proximal steps first, then non-negative least squares.

    The proximal point method (Rockafellar 1976, SIAM J. Control Optim. 14) repeats a strictly convex program, with
    ``1/2 eps |b - b_previous|^2`` added, from b = 0. Of several optimal points it comes, to rounding, to the one of
    least |b|: equal rows share, and the order of the rows does not matter.

    Args:
        matrix: S, shape [K, K], positive semi-definite, unit diagonal.
        inverse_norms: v, shape [K], the largest being 1.
        gap: The relative duality gap of t, to be brought to ``tolerance``.
        tolerance: Gap at which to stop.

    Returns:
        t on the simplex (the best point seen), proximal steps made, and the name of the method that found it.
    """
    best_gap, best_weights, steps = _proximal(matrix, inverse_norms, gap, tolerance)
    method = "proximal quadprog"
    if best_gap > tolerance:
        weights = _least_squares(matrix, inverse_norms)
        if weights is not None and gap(weights) < best_gap:
            best_weights, method = weights, "nnls"
    shared = _share_ties(matrix, inverse_norms, best_weights)
    # Nearly stationary, what is rounding between tied rows can be signal for the gap.
    return (shared if gap(shared) <= max(best_gap, tolerance) else best_weights), steps, method


def _proximal(matrix: Array, inverse_norms: Array, gap: Gap, tolerance: float) -> tuple[float, Array, int]:
    identity, zeros = _bounds(len(matrix))
    regular = matrix + np.outer(inverse_norms, inverse_norms) + _PROXIMITY * identity
    best_gap, best_weights, point, stalled, steps = np.inf, inverse_norms / inverse_norms.sum(), zeros, 0, 0
    while steps < _MAX_STEPS and stalled < 3 and best_gap > tolerance:
        point = np.maximum(quadprog.solve_qp(regular, inverse_norms + _PROXIMITY * point, identity, zeros)[0], 0.0)
        steps += 1
        weights = _simplex(point, inverse_norms)
        reached = np.inf if weights is None else gap(weights)
        stalled = 0 if reached < best_gap / 2 else stalled + 1
        if weights is not None and reached < best_gap:
            best_gap, best_weights = reached, weights
    return best_gap, best_weights, steps


def _least_squares(matrix: Array, inverse_norms: Array) -> Array | None:
    values, vectors = np.linalg.eigh(matrix)
    factor = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    target = np.zeros(len(matrix) + 1)
    target[-1] = 1.0
    try:
        point, _ = nnls(np.vstack([factor, inverse_norms]), target, maxiter=50 * len(matrix))
    except RuntimeError:
        return None
    return _simplex(point, inverse_norms)


def _simplex(point: Array, inverse_norms: Array) -> Array | None:
    weights = np.maximum(point, 0.0) * inverse_norms
    total = weights.sum()
    # Not `total <= 0`: NaN has to end up here too.
    if not 0.0 < total < np.inf:
        return None
    normalized: Array = weights / total
    return normalized


def _share_ties(matrix: Array, inverse_norms: Array, weights: Array) -> Array:
    near = matrix > 1 - _TIE
    if np.count_nonzero(near) == len(matrix):
        return weights
    # Equal rows have a correlation of 1: only such pairs need to be compared as a whole.
    first, second = np.nonzero(near)
    same = np.zeros(matrix.shape, dtype=bool)
    same[first, second] = (np.abs(matrix[first] - matrix[second]).max(axis=1) <= _TIE) & (
        np.abs(inverse_norms[first] - inverse_norms[second]) <= _TIE * inverse_norms[second]
    )
    shared = (same / same.sum(axis=1, keepdims=True)) @ weights
    normalized: Array = shared / shared.sum()
    return normalized
