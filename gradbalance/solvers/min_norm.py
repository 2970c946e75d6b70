"""Min-norm point of the convex hull of K rows, from their Gramian (the subproblem of MGDA)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradbalance.errors import InvalidArgumentError
from gradbalance.solvers.correlation import Array, Correlation, as_float64, nearest_semidefinite, split
from gradbalance.solvers.hull import positive_definite, semidefinite
from gradbalance.solvers.pair import certificate, pair_from, pair_of, shortest
from gradbalance.solvers.solution import SMALL, STATIONARY, Solution

_TOLERANCE = 1e-9
# The quick method's answer is taken at a tenth of the promised gap, the singular one's at a third: room for rounding.
_QUICK = 1e-10
_EXACT = 3e-10


def min_norm(gram: Any, floor: float = 0.0) -> Solution:
    """Weights of the shortest vector in the convex hull of K rows, each weight at least ``floor``.

        minimize 1/2 a' G a   subject to   a_k >= f,  sum_k a_k = 1.

    At the optimum with f = 0, ``x = sum_k a_k g_k`` has <x, g_k> >= |x|^2 for every k: no objective is opposed. On
    every positive semi-definite Gramian with finite entries and K from 1 to 64, whatever its rank and with row norms
    spread over 1e+-12, the weights are at least f, sum to 1 within 1e-12, and have a duality gap (see
    :class:`Solution`) of at most 1e-9. Scaling G leaves x's direction, reordering rows leaves x as it is. Where several
    weight vectors give the same x, equal rows get equal weights and the rest is, to rounding, the choice of least sum_k
    (a_k n_k)^2.

    A lower bound only makes the hull smaller: with ``a = f + (1 - K f) t`` this is the min-norm problem, for t on the
    simplex, of the rows ``h_k = (1 - K f) g_k + f sum_j g_j``.

    Method: closed form for K = 2; otherwise a dual active-set method (quadprog) on the correlation matrix, so that row
    norms do not spoil the conditioning. Its duality gap is computed, and a method for singular matrices follows where
    it is poor (duplicate or opposite rows, K > P, nearly Pareto-stationary): see ``gradbalance/solvers/hull.py``.

    A zero row makes 0 the shortest vector, if f = 0: the zero rows share the weight equally and ``stationary`` is true.
    To balance the others, leave dead objectives out, as :class:`gradbalance.MARBLE` does.

    Args:
        gram: G, shape [K, K]: torch tensor (any floating dtype, any device), numpy array, or nested sequence.
        floor: f, in [0, 1/K].

    Returns:
        The solution. ``found`` is false, with a ``reason``, if the gap is above 1e-9. Negative eigenvalues within the
        rounding of a float32 (or half) Gramian are raised to zero, which ``reason`` then tells.

    Raises:
        InvalidArgumentError: ``gram`` is no Gramian (shape, symmetry, definiteness), or ``floor`` is outside [0, 1/K].
        NonFiniteError: ``gram`` holds NaN or Inf.

    References:
        Désidéri 2012, Multiple-gradient descent algorithm, C. R. Acad. Sci. Paris 350; Sener and Koltun 2018,
        arXiv 1810.04650, eq. 3 (K rows) and eq. 4 (K = 2).

    Example:
        >>> min_norm([[1.0, 0.0], [0.0, 3.0]]).weights.round(12)
        array([0.75, 0.25])
        >>> min_norm([[1.0, -0.5, 0.0], [-0.5, 1.0, 0.0], [0.0, 0.0, 1.0]]).is_optimal()
        True
    """
    full, precision = as_float64(gram)
    pair = pair_of(full, precision)
    if pair is not None and checked_rest(floor, 2) > 0.0:
        weights = shortest(pair, floor)
        return _judged(np.array(weights), *certificate(pair, weights, floor), 0, "closed form")
    rows = split(full, precision)
    count = len(rows.norms)
    rest = checked_rest(floor, count)
    if rest == 0.0 or count == 1:
        return _solution(rows, np.full(count, 1.0 / count), floor, 0.0, 0, "closed form")
    if count == 2:
        return _solution(rows, np.array(shortest(pair_from(rows), floor)), floor, rest, 0, "closed form")
    hull = shrunk(rows, floor, rest)
    if hull.norms.min() > 0.0:
        quick = positive_definite(hull.matrix, hull.norms.min() / hull.norms)
        if quick is not None:
            solution = _solution(rows, _raised(quick[0], floor, rest), floor, rest, quick[1], "quadprog")
            if solution.gap <= _QUICK:
                return solution
    return _singular(rows, floor, rest)


def checked_rest(floor: float, count: int) -> float:
    """Return 1 - K f, exactly 0 where f is 1/K to the rounding of float32."""
    rest = 1.0 - count * floor
    if not (floor >= 0.0 and rest >= -1e-6):
        raise InvalidArgumentError(
            f"`floor` should be in [0, 1/K], so that K lower bounds leave room in a sum of 1. Found floor = {floor!r} "
            f"with K = {count}: the bounds sum to {count * floor:.6g}."
        )
    return 0.0 if rest <= 1e-6 else rest


def shrunk(rows: Correlation, floor: float, rest: float) -> Correlation:
    """Correlation of the rows ``h_k = rest g_k + floor sum_j g_j``, the corners of a simplex with lower bounds."""
    if floor == 0.0:
        return rows
    norms = rows.norms / max(rows.norms.max(), 1e-150)
    gram = rows.matrix * (norms[:, None] * norms)
    sums = gram.sum(axis=1)
    shrunk = rest**2 * gram + rest * floor * (sums[:, None] + sums) + floor**2 * sums.sum()
    # Rounding is relative to the length that h_k would have if nothing cancelled; what is left below it is zero.
    lengths = rest * norms + floor * norms.sum()
    squared = shrunk.diagonal().copy()
    squared[squared <= 4e-15 * len(norms) * lengths**2] = 0.0
    short = np.sqrt(squared)
    safe = np.where(short > 0.0, short, 1.0)
    matrix = np.clip(shrunk / (safe[:, None] * safe), -1.0, 1.0)
    np.fill_diagonal(matrix, 1.0)
    return Correlation(matrix, short, rows.rounding)


def _raised(simplex: Array, floor: float, rest: float) -> Array:
    return simplex if floor == 0.0 else floor + rest * simplex


def _singular(rows: Correlation, floor: float, rest: float) -> Solution:
    matrix, smallest = nearest_semidefinite(rows.matrix, rows.rounding)
    repaired = Correlation(matrix, rows.norms, rows.rounding)
    hull = shrunk(repaired, floor, rest)
    zero = hull.norms == 0.0
    if zero.any():
        simplex, iterations, method = zero / zero.sum(), 0, "closed form"
    else:
        # The shrunk rows' matrix carries rounding of its own, harmless but for the factorizations.
        shape = hull.matrix if floor == 0.0 else nearest_semidefinite(hull.matrix, np.inf)[0]
        simplex, iterations, method = semidefinite(
            shape,
            hull.norms.min() / hull.norms,
            lambda t: _gap(repaired, _raised(t, floor, rest), floor, rest)[0],
            _EXACT,
        )
    solution = _solution(repaired, _raised(simplex, floor, rest), floor, rest, iterations, method)
    if smallest < -1e-14 * len(matrix):
        note = f"negative eigenvalues of the correlation matrix, down to {smallest:.1e}, were raised to 0"
        reason = f"{solution.reason}; {note}" if solution.reason else note
        solution = Solution(
            solution.weights, solution.found, solution.gap, iterations, method, reason, stationary=solution.stationary
        )
    return solution


def _solution(rows: Correlation, weights: Array, floor: float, rest: float, iterations: int, method: str) -> Solution:
    return _judged(weights, *_gap(rows, weights, floor, rest), iterations, method)


def _judged(weights: Array, gap: float, stationary: bool, iterations: int, method: str) -> Solution:
    found = gap <= _TOLERANCE
    reason = "" if found else f"the duality gap is {gap:.1e}, above {_TOLERANCE:.0e}"
    return Solution(weights, found, gap, iterations, method, reason, stationary)


def _gap(rows: Correlation, weights: Array, floor: float, rest: float) -> tuple[float, bool]:
    """Return Solution.gap and Solution.stationary of the weights."""
    longest = rows.norms.max()
    if longest == 0.0:
        return 0.0, True
    norms = rows.norms / longest
    # dot takes a fraction of the time that sums and products of small arrays take.
    total = float(weights.dot(norms))
    if total == 0.0:
        return 0.0, True
    ratios = norms / total
    shares = weights * ratios
    slopes = rows.matrix.dot(shares)
    squared = float(shares.dot(slopes))
    if rest == 0.0:
        return 0.0, squared <= STATIONARY
    products = ratios * slopes
    if floor == 0.0:
        mean = squared
    else:
        mean = float((weights - floor).dot(products))
        products *= rest
    violation = float(((mean - products) / np.maximum(ratios, 1.0)).max())
    return max(violation / max(squared, SMALL), 0.0), squared <= STATIONARY
