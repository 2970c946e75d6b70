"""Min-norm weights of the unit rows, the step that MGDA with normalization and MARBLE share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.solvers import Solution, min_norm, preferred_min_norm
from gradbalance.solvers.correlation import correlation


@dataclass(frozen=True, slots=True, eq=False)
class UnitRows:
    """Norms and unit-row Gramian of the rows that are not zero."""

    norms: NDArray[np.float64]
    """Norms of all rows, shape [K]."""
    valid: NDArray[np.bool_]
    """Which rows are not zero, shape [K]."""
    cosines: NDArray[np.float64]
    """Cosines between the V valid rows, shape [V, V]."""

    @property
    def mean_norm(self) -> float:
        """Mean norm of the valid rows; 0 where there is none."""
        return float(self.norms[self.valid].mean()) if self.valid.any() else 0.0

    def spread(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Put values of the valid rows into K places, the others 0."""
        full = np.zeros(len(self.norms))
        full[self.valid] = values
        return full

    def on_raw_rows(self, coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights ``c_k = alpha_k mean_norm / |g_k|`` on the raw rows; 0 for zero rows."""
        return self.spread(coefficients[self.valid] * (self.mean_norm / self.norms[self.valid]))


def unit_rows(gram: Tensor) -> UnitRows:
    """Split a Gramian into norms and the cosines between the rows that are not zero.

    Raises:
        NonFiniteError: NaN or Inf in ``gram``.
        InvalidArgumentError: ``gram`` is no Gramian.
    """
    matrix, norms, _ = correlation(gram)
    valid = norms > 0.0
    return UnitRows(norms, valid, matrix[np.ix_(valid, valid)])


def nearest_direction(
    rows: UnitRows, floor: float, priorities: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], Solution]:
    """Minimize ``|sum_k alpha_k g_k / |g_k||^2`` over the simplex of the valid rows, with alpha_k >= ``floor``.

    With priorities p, shape [K], it is divided by ``(sum_k alpha_k p_k)^2``: see
    :func:`~gradbalance.solvers.preferred_min_norm`.

    Returns:
        alpha, shape [K], 0 for zero rows, and the certificate of the solve. With no valid row, alpha is 0 and the
        certificate says so.
    """
    if not rows.valid.any():
        return np.zeros(len(rows.norms)), no_signal(len(rows.norms))
    if priorities is None:
        solution = min_norm(rows.cosines, floor)
    else:
        solution = preferred_min_norm(rows.cosines, priorities[rows.valid], floor)
    return rows.spread(solution.weights), solution


def no_signal(count: int) -> Solution:
    """Return the certificate for K zero rows: nothing to balance, weights 0."""
    return Solution(np.zeros(count), False, 0.0, 0, "none", "all rows are zero", stationary=True)
