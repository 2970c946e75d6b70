"""MGDA: the min-norm point of the gradients, or of their directions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradbalance.balancers.preference import checked_preference, priorities_for
from gradbalance.balancers.unit_rows import nearest_direction, unit_rows
from gradbalance.errors import InvalidArgumentError
from gradbalance.solvers import Solution, min_norm, preferred_min_norm


class MGDA:
    """Multiple-gradient descent: the shortest vector in the convex hull of the rows.

    With ``normalize=False`` the weights minimize |sum_k c_k g_k|^2 over the simplex, c_k >= ``floor``. The shortest
    rows dominate; a zero row makes the direction 0 (all weight goes to it), as a Pareto-stationary point should.

    With ``normalize=True`` the same is solved for the unit rows ``g_k / |g_k|``, giving alpha, and the direction gets
    the mean norm N of the rows: ``c_k = alpha_k N / |g_k|``. Zero rows are left out (weight 0). This is MARBLE without
    memory.

    **Preference.** With priorities p the same is solved for the rows ``u_k = g_k / p_k`` (``g_k / (|g_k| p_k)`` if
    normalized), and its weights b, divided by p and brought back to the simplex, take the place of those above. Hence,
    for the direction d, a_k its coefficients and P = sum_j a_j p_j,

        <d, g_k> = (p_k / P) |d|^2          for every k with a_k > 0, and no less for the others,
        <d, g_k / |g_k|> = (p_k / P) |d|^2 / N      if normalized:

    the gains of the objectives, to first order, go with their priorities, where plain MGDA makes them equal. An
    objective that gains more than its part anyway is left inactive. No row is opposed, and only the ratios of the
    priorities matter: |d| is at most N, as without them.

    Args:
        normalize: Solve for directions in place of gradients.
        floor: Lower bound on each simplex weight, in [0, 1/K]; with a preference, on the weights that it leads to.
        preference: One priority > 0 per objective, in the order of the losses; None for equal ones.

    Attributes:
        solution: Certificate of the last solve (with ``normalize=True`` over the rows that are not zero); None before.
        coefficients: Simplex numbers of the last solve, float64 [K]; None before.

    Raises:
        InvalidArgumentError: ``floor`` is not in [0, 1], or a priority is not finite and > 0; when called, ``floor`` is
            above 1/K, there are not K priorities, or ``gram`` is no Gramian.
        NonFiniteError: When called with NaN or Inf.

    References:
        Désidéri 2012, Multiple-gradient descent algorithm; Sener and Koltun 2018, arXiv 1810.04650, eq. 3.

    Example:
        >>> MGDA()(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
        >>> MGDA(normalize=True)(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
        tensor([0.7500, 0.3750], dtype=torch.float64)
        >>> MGDA(preference=[3, 1])(torch.eye(2))  # gains 3/4 and 1/4
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    def __init__(self, normalize: bool = False, floor: float = 0.0, preference: Iterable[float] | None = None) -> None:
        self.normalize = bool(normalize)
        self.floor = checked_floor(floor)
        self.preference = checked_preference(preference)
        self.solution: Solution | None = None
        self.coefficients: Tensor | None = None

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Weights on the raw rows, shape [K], float64, from their Gramian."""
        if not self.normalize:
            self.solution = self._shortest(gram)
            self.coefficients = torch.tensor(self.solution.weights)
            return self.coefficients.clone()
        rows = unit_rows(gram)
        priorities = priorities_for(self.preference, len(rows.norms))
        alpha, self.solution = nearest_direction(rows, self.floor, priorities)
        self.coefficients = torch.tensor(alpha)
        return torch.from_numpy(rows.on_raw_rows(alpha))

    def _shortest(self, gram: Tensor) -> Solution:
        if self.preference is None:
            return min_norm(gram, self.floor)
        priorities = priorities_for(self.preference, len(unit_rows(gram).norms))
        return min_norm(gram, self.floor) if priorities is None else preferred_min_norm(gram, priorities, self.floor)

    def __repr__(self) -> str:
        preference = None if self.preference is None else list(self.preference)
        return f"MGDA(normalize={self.normalize}, floor={self.floor}, preference={preference})"


def checked_floor(floor: float) -> float:
    """Return ``floor`` as a float, refusing what no K allows."""
    if not 0.0 <= floor <= 1.0:
        raise InvalidArgumentError(f"`floor` should be in [0, 1/K]. Found floor = {floor!r}.")
    return float(floor)
