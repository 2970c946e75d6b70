"""MGDA: the min-norm point of the gradients, or of their directions."""

from __future__ import annotations

import torch
from torch import Tensor

from gradbalance.balancers.unit_rows import nearest_direction, unit_rows
from gradbalance.errors import InvalidArgumentError
from gradbalance.solvers import Solution, min_norm


class MGDA:
    """Multiple-gradient descent: the shortest vector in the convex hull of the rows.

    With ``normalize=False`` the weights minimize |sum_k c_k g_k|^2 over the simplex, c_k >= ``floor``. The shortest
    rows dominate; a zero row makes the direction 0 (all weight goes to it), as a Pareto-stationary point should.

    With ``normalize=True`` the same is solved for the unit rows ``g_k / |g_k|``, giving alpha, and the direction gets
    the mean norm N of the rows: ``c_k = alpha_k N / |g_k|``. Zero rows are left out (weight 0). This is MARBLE without
    memory.

    Args:
        normalize: Solve for directions in place of gradients.
        floor: Lower bound on each simplex weight, in [0, 1/K].

    Attributes:
        solution: Certificate of the last solve (with ``normalize=True`` over the rows that are not zero); None before.
        coefficients: Simplex numbers of the last solve, float64 [K]; None before.

    Raises:
        InvalidArgumentError: ``floor`` is not in [0, 1]; when called, it is above 1/K, or ``gram`` is no Gramian.
        NonFiniteError: When called with NaN or Inf.

    References:
        Désidéri 2012, Multiple-gradient descent algorithm; Sener and Koltun 2018, arXiv 1810.04650, eq. 3.

    Example:
        >>> MGDA()(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
        >>> MGDA(normalize=True)(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
        tensor([0.7500, 0.3750], dtype=torch.float64)
    """

    def __init__(self, normalize: bool = False, floor: float = 0.0) -> None:
        self.normalize = bool(normalize)
        self.floor = checked_floor(floor)
        self.solution: Solution | None = None
        self.coefficients: Tensor | None = None

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Weights on the raw rows, shape [K], float64, from their Gramian."""
        if not self.normalize:
            self.solution = min_norm(gram, self.floor)
            self.coefficients = torch.tensor(self.solution.weights)
            return self.coefficients.clone()
        rows = unit_rows(gram)
        alpha, self.solution = nearest_direction(rows, self.floor)
        self.coefficients = torch.tensor(alpha)
        return torch.from_numpy(rows.on_raw_rows(alpha))

    def __repr__(self) -> str:
        return f"MGDA(normalize={self.normalize}, floor={self.floor})"


def checked_floor(floor: float) -> float:
    """Return ``floor`` as a float, refusing what no K allows."""
    if not 0.0 <= floor <= 1.0:
        raise InvalidArgumentError(f"`floor` should be in [0, 1/K]. Found floor = {floor!r}.")
    return float(floor)
