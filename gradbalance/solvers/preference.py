"""The min-norm point among directions whose gains go with priorities: the min-norm problem of rows divided by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gradbalance.solvers.correlation import Array, Correlation, correlation, nearest_semidefinite
from gradbalance.solvers.min_norm import checked_rest, min_norm, shrunk
from gradbalance.solvers.solution import Solution


def preferred_min_norm(gram: Any, priorities: Array, floor: float = 0.0) -> Solution:
    """Weights of a direction along which objective k gains in proportion to p_k.

        minimize |sum_k a_k g_k|^2 / (sum_k a_k p_k)^2   subject to   a_k >= f,  sum_k a_k = 1.

    With f = 0 and b_k proportional to a_k p_k, this is the min-norm problem of the rows ``u_k = g_k / p_k``. Its
    solution x has <x, u_k> >= |x|^2, with equality where b_k > 0, so that for ``d = sum_k a_k g_k``, which has the
    direction of x,

        <d, g_k> = p_k |d|^2 / sum_j a_j p_j   where a_k > 0, and no less elsewhere.

    With f > 0 the admissible a are the mixtures, with weights t on the simplex, of K corners; corner k has the row
    ``h_k = (1 - K f) g_k + f sum_j g_j`` and the priority ``q_k = (1 - K f) p_k + f sum_j p_j``. The problem is the
    min-norm problem of ``h_k / q_k``.

    Args:
        gram: G, shape [K, K], as for :func:`~gradbalance.min_norm`.
        priorities: p, shape [K], finite and > 0; only their ratios matter.
        floor: f, in [0, 1/K].

    Returns:
        The weights a, with the certificate of the min-norm problem that was solved. Equal p give what ``min_norm``
        gives, to rounding.

    Raises:
        InvalidArgumentError, NonFiniteError: As ``min_norm``.

    Example:
        >>> preferred_min_norm(np.eye(2), np.array([3.0, 1.0])).weights  # gains 3/4 and 1/4
        array([0.75, 0.25])
    """
    rows = correlation(gram)
    rest = checked_rest(floor, len(rows.norms))
    if rest == 0.0:  # a single point is admissible
        return min_norm(gram, floor)
    shares = priorities / priorities.max()
    # Clean before scaling: min_norm takes the product for exact float64, whatever precision the Gramian came in.
    rows = rows._replace(matrix=nearest_semidefinite(rows.matrix, rows.rounding)[0])
    if floor > 0.0:
        rows = shrunk(rows, floor, rest)
        # Where rows cancel, the rounding of what is left is anything but semi-definite.
        rows = Correlation(nearest_semidefinite(rows.matrix, np.inf)[0], rows.norms, rows.rounding)
        shares = rest * shares + floor * shares.sum()
    scaled = rows.norms / shares
    scaled /= max(scaled.max(), 1e-150)
    zero = scaled == 0.0
    matrix = np.where(zero[:, None] | zero, 0.0, rows.matrix)
    solution = min_norm(matrix * (scaled[:, None] * scaled))
    simplex = solution.weights * (shares.min() / shares)
    simplex /= simplex.sum()
    return replace(solution, weights=simplex if floor == 0.0 else floor + rest * simplex)
