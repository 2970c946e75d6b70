"""A balancer of your own: IMTL-G in about 20 lines, checked against what it claims.

IMTL-G (Liu et al. 2021, Towards impartial multi-task learning, ICLR, eq. 6) looks for weights, summing to 1, whose
direction d = sum_k c_k g_k has the same projection on every unit row: <d, g_k / |g_k|> equal for all k. With the cosine
matrix C and c_k = b_k / |g_k| that is C b = 1 up to a factor: one linear system.

    python examples/custom_balancer.py

Needs the extra `testing`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import gradbalance as gb
from gradbalance.testing import (
    ClaimError,
    check_balancer,
    determinism,
    finite_output,
    leaves_input_alone,
    memoryless,
    non_conflict,
    permutation_equivariance,
    scale_equivariance,
    scale_invariance,
    zero_rows_change_nothing,
    zero_rows_get_zero_weight,
)


class IMTLG:
    """Equal projections on all unit rows; the direction is as long as the weights' sum of 1 makes it."""

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Weights on the raw rows, shape [K]; 0 for zero rows, and all 0 where projections can only be equal at 0."""
        norms = gram.diagonal().sqrt()
        alive = norms > 0
        weights = torch.zeros_like(norms)
        if alive.any():
            unit = gb.cosines(gram)[alive][:, alive]
            lengths = torch.linalg.lstsq(unit, torch.ones(len(unit), 1, dtype=unit.dtype), driver="gelsd").solution[
                :, 0
            ]
            # Without a solution of C b = 1 no direction gains equally on all: stay.
            if (unit @ lengths - 1).abs().max() < 1e-6:
                share = lengths / norms[alive]
                weights[alive] = share / share.sum().abs()
        return weights


CLAIMS = [
    finite_output,
    determinism,
    memoryless,
    leaves_input_alone,
    permutation_equivariance,
    scale_equivariance,
    scale_invariance,
    non_conflict,
    zero_rows_get_zero_weight,
    zero_rows_change_nothing,
]


def main() -> None:
    """Check the claims, show that a false one is found, and train with the new balancer."""
    check_balancer(IMTLG, claims=CLAIMS, tolerance=1e-4)
    print(f"IMTLG keeps its {len(CLAIMS)} claims")

    try:
        check_balancer(IMTLG, claims=[gb.testing.non_negative_weights])
    except ClaimError as error:
        print(error)

    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer = gb.BalancedOptimizer(torch.optim.Adam([weight], lr=0.1), IMTLG())
    for _ in range(200):
        optimizer.backward({"small": 0.01 * (weight[0] - 2) ** 2, "large": 100 * (weight[1] - 2) ** 2})
        optimizer.step()
        optimizer.zero_grad()
    print(f"both objectives are served, whatever their scale: {weight.tolist()}")


if __name__ == "__main__":
    main()
