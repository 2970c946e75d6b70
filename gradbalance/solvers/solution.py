"""What every solver returns: weights, and the certificate by which they can be judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, slots=True)
class Solution:
    r"""Weights on K raw rows and their certificate.

    Notation: G is the Gramian, :math:`n_k = \sqrt{G_{kk}}` the row norms, a the weights, :math:`x = \sum_k a_k g_k` the
    combined row, :math:`B = \sum_k a_k n_k` the length it would have if all rows pointed the same way.

    Attributes:
        weights: a, shape [K], float64. Always finite.
        found: Whether the promise of the solver is kept (``gap`` within its tolerance). The weights are usable either way.
        gap: How far from optimal, 0 being exact.

            For ``min_norm`` with lower bound f, :math:`a = f + (1 - Kf)\,t` and t on the simplex, the duality gap

            .. math::
                \text{gap} = \max_k \frac{(1 - Kf)\,\bigl(\sum_j t_j (Ga)_j - (Ga)_k\bigr)}
                                         {\max(a^\top G a,\; 10^{-5} B^2)\;\max(1,\; n_k / B)} .

            With f = 0 and rows of one length this is the Frank-Wolfe gap :math:`(a^\top G a - \min_k (Ga)_k) / a^\top G a`,
            which bounds the relative error of the objective. A row longer than B counts per unit of its length, since its
            entry :math:`(Ga)_k` is only known to :math:`10^{-16} n_k B`. The lower bound on the denominator is for
            (nearly) Pareto-stationary points: when x is under 0.3 % of B, the gap is measured against 0.001 % of
            :math:`B^2`, since :math:`a^\top G a` itself is only known to :math:`10^{-16} B^2`.

            For ``nash`` the residual :math:`\max_k |a_k (Ga)_k - 1|`.
        iterations: Iterations of the iterative method; 0 for a closed form.
        method: Which method gave the weights.
        reason: Why ``found`` is false, or what had to be repaired; empty otherwise.
        stationary: The point is Pareto-stationary as far as the Gramian can tell: :math:`\|x\| \le 10^{-6} B`, or a row is
            zero. No direction then improves all objectives to first order.
    """

    weights: NDArray[np.float64]
    found: bool
    gap: float
    iterations: int
    method: str
    reason: str = ""
    stationary: bool = False

    def is_optimal(self, tol: float = 1e-9) -> bool:
        """Whether ``gap`` is at most ``tol``.

        Example:
            >>> Solution(np.array([0.5, 0.5]), found=True, gap=1e-16, iterations=0, method="closed form").is_optimal()
            True
        """
        return self.gap <= tol
