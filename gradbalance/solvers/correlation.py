"""Check a Gramian and split it into correlation matrix and row norms, the form in which every solver here works."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gradbalance.errors import InvalidArgumentError, NonFiniteError

Array: TypeAlias = NDArray[np.float64]

# A squared norm under this cannot give correlations: products with other rows leave the range of normal float64.
_SMALLEST = 1e-290


class Precision(NamedTuple):
    """What can be relied on in a Gramian of some dtype."""

    rounding: float
    """How far correlations may be off."""
    smallest: float
    """Squared norms below count as zero: they are too coarsely stored to give correlations."""


class Correlation(NamedTuple):
    """A Gramian G as its correlation matrix and row norms: ``G[i, j] = matrix[i, j] * norms[i] * norms[j]``."""

    matrix: Array
    """C, shape [K, K], exactly symmetric, exactly 1 on the diagonal; zero rows have a zero row and column."""
    norms: Array
    """n, shape [K], not negative."""
    rounding: float
    """How far entries of C may be off, by the dtype of the input: 1e-6 for float32 and float64, more for half types."""


def correlation(gram: Any) -> Correlation:
    """Split a Gramian into correlation matrix and norms, refusing what is no Gramian.

    Args:
        gram: K x K torch tensor of any floating dtype and device, numpy array, or nested sequence of numbers.

    Returns:
        Correlation matrix and norms. Asymmetry within rounding is averaged out. A row whose squared norm is below
        1e-290 is a zero row.

    Raises:
        InvalidArgumentError: Not square, empty, not symmetric beyond rounding, a negative diagonal entry, or an entry
            larger than the product of its two norms beyond rounding.
        NonFiniteError: NaN or Inf; its ``objectives`` are the indices, as strings.
    """
    return split(*as_float64(gram))


def split(full: Array, precision: Precision) -> Correlation:
    """:func:`correlation` of what :func:`as_float64` gave; ``full`` is read and not kept."""
    if full.ndim != 2 or full.shape[0] != full.shape[1] or full.shape[0] == 0:
        raise InvalidArgumentError(f"`gram` should be a square K x K matrix with K >= 1. Found shape {full.shape}.")
    # A first look with few calls of numpy, which are what takes time where K is small. NaN may slip through until it
    # meets the last comparison; Inf makes a correlation that is too large.
    squared = full.diagonal().tolist()
    if precision.smallest <= min(squared) and max(squared) < math.inf and full.tobytes() == full.T.tobytes():
        norms = np.sqrt(squared)
        matrix = full / (norms[:, None] * norms)
        matrix.flat[:: len(norms) + 1] = 1.0
        if np.abs(matrix).max() <= 1.0:
            return Correlation(matrix, norms, precision.rounding)
    return _examined(full, precision)


def _examined(full: Array, precision: Precision) -> Correlation:
    """The same for any square matrix, with errors that say what is wrong."""
    _require_finite(full)
    squared = full.diagonal()
    if squared.min() < precision.smallest:
        return _with_zero_rows(full, precision)
    norms = np.sqrt(squared)
    return Correlation(_checked(full / (norms[:, None] * norms), precision.rounding), norms, precision.rounding)


def as_float64(gram: Any) -> tuple[Array, Precision]:
    """The numbers of a Gramian of any kind, perhaps in memory that they share with it, and how precise they are.

    Raises:
        InvalidArgumentError: Not an array of real numbers.
    """
    if isinstance(gram, torch.Tensor) and not gram.is_complex():
        wide = gram.detach()
        if gram.dtype != torch.float64 or gram.device.type != "cpu":
            wide = wide.to(device="cpu", dtype=torch.float64)
        return wide.numpy(), _precision(gram.dtype)
    try:
        array = np.asarray(gram)
    except ValueError as error:  # ragged sequences
        raise InvalidArgumentError(f"`gram` should be a square K x K matrix of real numbers. {error}") from error
    if array.dtype.kind not in "fiu":
        raise InvalidArgumentError(f"`gram` should hold real numbers. Found dtype {array.dtype}.")
    return array.astype(np.float64), _precision(getattr(torch, array.dtype.name, torch.float64))


@lru_cache(maxsize=32)
def _precision(dtype: torch.dtype) -> Precision:
    info = torch.finfo(dtype if dtype.is_floating_point else torch.float64)
    rounding = max(1e-6, 8 * info.eps)
    # The spacing of subnormal numbers, as a share of the entry, has to stay below the rounding allowed for.
    return Precision(rounding, max(_SMALLEST, 4 * info.tiny * info.eps / rounding))


def _require_finite(full: Array) -> None:
    finite = np.isfinite(full)
    if finite.all():
        return
    # A row with NaN spoils its own diagonal entry and one entry of every other row: blame the diagonal where it tells.
    bad = np.flatnonzero(~finite.diagonal())
    if not bad.size:
        bad = np.flatnonzero(~finite.all(axis=1))
    raise NonFiniteError(
        f"The Gramian should be finite. Found NaN or Inf in the rows of objective(s) {', '.join(map(str, bad))} "
        "(counted from 0). Look at the loss and the gradient of these; with a GradScaler, skip the step.",
        objectives=[str(index) for index in bad],
    )


def _checked(matrix: Array, rounding: float) -> Array:
    if not (matrix == matrix.T).all():
        asymmetry = np.abs(matrix - matrix.T).max()
        if not asymmetry <= rounding:
            raise InvalidArgumentError(
                f"`gram` should be symmetric. Found entries that differ from their mirror images by {asymmetry:.3g} of "
                "the product of their norms. A Gramian is rows @ rows.T."
            )
        matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 1.0)
    largest = np.abs(matrix).max()
    if largest > 1.0:
        if largest > 1.0 + rounding:
            row, column = np.unravel_index(np.abs(matrix).argmax(), matrix.shape)
            raise InvalidArgumentError(
                f"`gram` should be positive semi-definite. Found |gram[{row}, {column}]| = {largest:.6g} times the "
                "product of the two row norms, where at most 1 is possible. A Gramian is rows @ rows.T."
            )
        matrix = np.clip(matrix, -1.0, 1.0)
    return matrix


def _with_zero_rows(full: Array, precision: Precision) -> Correlation:
    squared = full.diagonal()
    lowest = int(squared.argmin())
    if squared[lowest] < -precision.rounding * np.abs(squared).max():
        raise InvalidArgumentError(
            f"`gram` should have squared norms on its diagonal. Found gram[{lowest}, {lowest}] = "
            f"{squared[lowest]:.6g}. A Gramian is rows @ rows.T."
        )
    zero = squared < precision.smallest
    # |<g_i, g_j>| <= |g_i| |g_j|: beside a row that is zero to rounding, only its rounding may stand.
    bounds = np.sqrt(np.maximum(np.abs(squared), precision.smallest))
    excess = np.abs(full) > 2 * bounds[:, None] * bounds
    if excess[zero].any():
        index = int(np.flatnonzero(excess.any(axis=1) & zero)[0])
        raise InvalidArgumentError(
            f"`gram` should be positive semi-definite. Found gram[{index}, {index}] = {squared[index]:.3g} beside "
            "larger entries in the same row. A Gramian is rows @ rows.T."
        )
    norms = np.where(zero, 0.0, np.sqrt(np.maximum(squared, 0.0)))
    matrix = np.zeros_like(full)
    if not zero.all():
        block = np.ix_(~zero, ~zero)
        valid = norms[~zero]
        matrix[block] = _checked(full[block] / (valid[:, None] * valid), precision.rounding)
    return Correlation(matrix, norms, precision.rounding)


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
    # Vectors, which take most of the time, are only needed for a repair.
    smallest = float(np.linalg.eigvalsh(matrix)[0])
    if smallest < -count * rounding:
        raise InvalidArgumentError(
            f"`gram` should be positive semi-definite. Found an eigenvalue of {smallest:.3g} in its correlation "
            "matrix. A Gramian is rows @ rows.T."
        )
    if smallest >= -1e-15 * count:
        return matrix, smallest
    values, vectors = np.linalg.eigh(matrix)
    factor = vectors * np.sqrt(np.maximum(values, 0.0))
    diagonal = matrix.diagonal()
    scale = np.where(diagonal > 0, 1 / np.maximum(np.linalg.norm(factor, axis=1), 1e-150), 0.0)
    factor *= scale[:, None]
    repaired = factor @ factor.T
    repaired = (repaired + repaired.T) / 2
    np.fill_diagonal(repaired, diagonal)
    return repaired, smallest
