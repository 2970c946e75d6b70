"""Check a Gramian and split it into correlation matrix and row norms, the form in which every solver here works."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gradbalance.errors import InvalidArgumentError, NonFiniteError

Array: TypeAlias = NDArray[np.float64]

# A squared norm under this cannot give correlations: the products with other rows leave the range of normal floats.
_ZERO = 1e-290


class Correlation(NamedTuple):
    """A Gramian G as its correlation matrix and row norms: ``G[i, j] = matrix[i, j] * norms[i] * norms[j]``."""

    matrix: Array
    """C, shape [K, K], exactly symmetric, exactly 1 on the diagonal; zero rows have a zero row and column."""
    norms: Array
    """n, shape [K], not negative."""
    rounding: float
    """How far entries of C may be off, by the dtype of the input: 1e-6 for float32 and float64, more for half types."""


def correlation(gram: Any) -> Correlation:
    """Split a Gramian, refusing what is none.

    Args:
        gram: A K x K torch tensor of any floating dtype and device, a numpy array, or a nested sequence of numbers.

    Returns:
        Correlation matrix and norms. Asymmetry within rounding is averaged out. A row whose squared norm is below 1e-290 is a
        zero row.

    Raises:
        InvalidArgumentError: Not square, empty, not symmetric beyond rounding, a negative diagonal entry, or an entry larger
            than the product of its two norms beyond rounding.
        NonFiniteError: NaN or Inf; ``objectives`` holds the indices, as strings.
    """
    full, rounding = _float64(gram)
    if full.ndim != 2 or full.shape[0] != full.shape[1] or full.shape[0] == 0:
        raise InvalidArgumentError(f"`gram` should be a square K x K matrix with K >= 1. Found shape {full.shape}.")
    # One reduction in place of K*K tests; a finite matrix whose sum overflows passes the closer look.
    if not math.isfinite(full.sum()):
        _require_finite(full)
    squared = full.diagonal()
    smallest = squared.min()
    if smallest < _ZERO:
        return _with_zero_rows(full, rounding)
    norms = np.sqrt(squared)
    return Correlation(_checked(full / (norms[:, None] * norms), rounding), norms, rounding)


def _float64(gram: Any) -> tuple[Array, float]:
    if isinstance(gram, torch.Tensor):
        eps = torch.finfo(gram.dtype).eps if gram.is_floating_point() else 0.0
        return gram.detach().to(device="cpu", dtype=torch.float64).numpy(), max(1e-6, 8 * eps)
    array = np.asarray(gram)
    eps = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0
    return array.astype(np.float64), max(1e-6, 8 * eps)


def _require_finite(full: Array) -> None:
    finite = np.isfinite(full)
    if finite.all():
        return
    # A row with NaN spoils its own diagonal entry and one entry of every other row: blame the diagonal where it tells.
    bad = np.flatnonzero(~finite.diagonal())
    if not bad.size:
        bad = np.flatnonzero(~finite.all(axis=1))
    raise NonFiniteError(
        f"The Gramian should be finite. Found NaN or Inf in the rows of objective(s) {', '.join(map(str, bad))} (counted from "
        "0). Look at the loss and the gradient of these; with a GradScaler, skip the step.",
        objectives=[str(index) for index in bad],
    )


def _checked(matrix: Array, rounding: float) -> Array:
    if not (matrix == matrix.T).all():
        asymmetry = np.abs(matrix - matrix.T).max()
        if not asymmetry <= rounding:
            raise InvalidArgumentError(
                f"`gram` should be symmetric. Found entries that differ by {asymmetry:.3g} of the product of their norms from "
                "their mirror images. A Gramian is rows @ rows.T."
            )
        matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 1.0)
    if not np.abs(matrix).max() <= 1 + rounding:
        row, column = np.unravel_index(np.abs(matrix).argmax(), matrix.shape)
        raise InvalidArgumentError(
            f"`gram` should be positive semi-definite. Found |gram[{row}, {column}]| = {abs(matrix[row, column]):.6g} times the "
            "product of the two row norms, where at most 1 is possible. A Gramian is rows @ rows.T."
        )
    return matrix


def _with_zero_rows(full: Array, rounding: float) -> Correlation:
    squared = full.diagonal()
    if squared.min() < -rounding * np.abs(squared).max():
        raise InvalidArgumentError(
            f"`gram` should have squared norms on its diagonal. Found gram[{squared.argmin()}, {squared.argmin()}] = "
            f"{squared.min():.6g}. A Gramian is rows @ rows.T."
        )
    zero = squared < _ZERO
    norms = np.where(zero, 0.0, np.sqrt(np.maximum(squared, 0.0)))
    valid = np.flatnonzero(~zero)
    # |<g_i, g_j>| <= |g_i||g_j|: with g_i zero to rounding, only rounding may stand beside it.
    slack = np.sqrt(np.maximum(np.maximum(-squared, _ZERO), 0.0))[:, None] * norms + rounding * _ZERO
    excess = np.abs(full[zero]) - 2 * slack[zero]
    if excess.size and excess.max() > 0:
        index = np.flatnonzero(zero)[excess.max(axis=1).argmax()]
        raise InvalidArgumentError(
            f"`gram` should be positive semi-definite. Found gram[{index}, {index}] = 0 beside non-zero entries in the same row. "
            "A Gramian is rows @ rows.T."
        )
    matrix = np.zeros_like(full)
    if valid.size:
        block = np.ix_(valid, valid)
        matrix[block] = _checked(full[block] / (norms[valid, None] * norms[valid]), rounding)
    return Correlation(matrix, norms, rounding)


def nearest_semidefinite(matrix: Array, rounding: float) -> tuple[Array, float]:
    """Raise the negative eigenvalues of a correlation matrix to zero, refusing more than rounding.

    Args:
        matrix: C, shape [K, K], symmetric.
        rounding: How far entries of C may be off.

    Returns:
        The matrix, repaired where an eigenvalue is under -1e-15 K, and the smallest eigenvalue found.

    Raises:
        InvalidArgumentError: An eigenvalue is below -K times ``rounding``.
    """
    count = len(matrix)
    values, vectors = np.linalg.eigh(matrix)
    smallest = float(values[0])
    if smallest < -count * rounding:
        raise InvalidArgumentError(
            f"`gram` should be positive semi-definite. Found an eigenvalue of {smallest:.3g} in its correlation matrix. A Gramian "
            "is rows @ rows.T."
        )
    if smallest >= -1e-15 * count:
        return matrix, smallest
    factor = vectors * np.sqrt(np.maximum(values, 0.0))
    diagonal = matrix.diagonal()
    scale = np.where(diagonal > 0, 1 / np.maximum(np.linalg.norm(factor, axis=1), 1e-150), 0.0)
    factor *= scale[:, None]
    repaired = factor @ factor.T
    repaired = (repaired + repaired.T) / 2
    np.fill_diagonal(repaired, diagonal)
    return repaired, smallest
