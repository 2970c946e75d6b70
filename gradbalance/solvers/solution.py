"""What every solver returns: weights, and the certificate by which they can be judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALL = 1e-5  # of B^2: see Solution.gap
STATIONARY = 1e-12  # |x|^2 in units of B^2: see Solution.stationary


@dataclass(frozen=True, eq=False, slots=True)
class Solution:
    """Weights on K raw rows and their certificate.

    Notation: G is the Gramian, ``n_k = sqrt(G[k, k])`` the row norms, a the weights, ``x = sum_k a_k g_k`` the combined
    row, ``B = sum_k a_k n_k`` the length that x would have if all rows pointed the same way.

    Attributes:
        weights: a, shape [K], float64. Always finite.
        found: Whether the solver keeps its promise (``gap`` within its tolerance). The weights are usable either way.
        gap: How far from optimal; 0 is exact.

            For ``min_norm`` with lower bound f, ``a = f + (1 - K f) t`` and t on the simplex, the relative duality gap

                gap = max_k (1 - K f) (sum_j t_j (G a)_j - (G a)_k) / (max(a' G a, 1e-5 B^2) max(1, n_k / B)).

            With f = 0 and rows of one length this is the Frank-Wolfe gap ``(a' G a - min_k (G a)_k) / a' G a``, which
            bounds the relative error of |x|^2. A row longer than B counts per unit of its length, because its
            ``(G a)_k`` is only known to 1e-16 n_k B. The bound 1e-5 B^2 is for nearly Pareto-stationary points, where
            |x| is under 0.3 % of B: a' G a itself is only known to 1e-16 B^2.

            For ``nash`` the residual ``max_k |a_k (G a)_k - 1|``.
        iterations: Iterations of the iterative method; 0 for a closed form.
        method: Which method gave the weights.
        reason: Why ``found`` is false, or what had to be repaired; empty otherwise.
        stationary: Pareto-stationary as far as the Gramian can tell: |x| is at most 1e-6 B, or a row is zero. No
            direction then improves all objectives to first order.
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
