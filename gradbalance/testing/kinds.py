"""Kinds of rows whose geometry is proved, as hypothesis strategies over integer rows.

A point is *Pareto-stationary* if 0 is a convex combination of the K rows; it is *strongly* so if all K weights of such
a combination can be positive, and *strictly weakly* so if they never all can. By Gordan's theorem it is not stationary
if and only if some d has <g_k, d> > 0 for all k (a direction that improves every objective).

Entries are small integers, times powers of two in the ill-scaled kinds. All products and sums of a Gramian are then
exact in float64, so what is proved for the rows holds for the Gramian without rounding. Each strategy shrinks to few,
small entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from hypothesis import assume
from hypothesis import strategies as st

Draw: TypeAlias = st.DrawFn
Matrix: TypeAlias = Sequence[Sequence[float]]
Integers: TypeAlias = list[list[int]]
LARGEST = 9
_SCALE = 40


def _lists(low: int, high: int, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=size, max_size=size)


def integer_rows(low: int, high: int, count: int, columns: int) -> st.SearchStrategy[Integers]:
    """Any integers between two bounds, in ``count`` rows of ``columns``."""

    def split(flat: list[int]) -> Integers:
        return [flat[i * columns : (i + 1) * columns] for i in range(count)]

    return _lists(low, high, count * columns).map(split)


@st.composite
def well_conditioned(draw: Draw, count: int) -> Integers:
    """Linearly independent rows; the condition number of their Gramian is at most 10.

    Proof. A = [M | N] with M = 2K I + E, all entries of E and N in [-1, 1], and at most K columns in N. The spectral
    norm is at most the Frobenius norm: |E| <= K and |N| <= K. So the least singular value of M is at least 2K - K = K,
    and K^2 <= lambda(A A') <= (3K)^2 + K^2. Independent rows have no convex combination 0: not stationary.
    """
    columns = count + draw(st.integers(0, count))
    rows = draw(integer_rows(-1, 1, count, columns))
    for k in range(count):
        rows[k][k] += 2 * count
    return rows


@st.composite
def non_stationary(draw: Draw, count: int) -> Integers:
    """Rows with a common improving direction.

    Proof. All first entries are positive, so <g_k, e_1> > 0 for all k.
    """
    columns = draw(st.integers(0, count + 1))
    rest = draw(integer_rows(-LARGEST, LARGEST, count, columns))
    first = draw(_lists(1, LARGEST, count))
    return [[entry, *row] for entry, row in zip(first, rest, strict=True)]


@st.composite
def conflicting(draw: Draw, count: int) -> Integers:
    """Not stationary, and at least two rows have a negative inner product. K >= 2.

    Proof. To non-stationary rows a column is added that is 1 in one row and -(1 + max(0, s)) in another, s being their
    inner product so far: it becomes s - 1 - max(0, s) <= -1. First entries stay positive.
    """
    rows = draw(non_stationary(count))
    s = sum(a * b for a, b in zip(rows[0], rows[1], strict=True))
    last = [1, -(1 + max(0, s)), *draw(_lists(-LARGEST, LARGEST, count - 2))]
    joined = [[*row, entry] for row, entry in zip(rows, last, strict=True)]
    return draw(st.permutations(joined))


@st.composite
def nearly_parallel(draw: Draw, count: int) -> Integers:
    """Not stationary; cosines between rows are at least 0.998 and may be within 2e-9 of 1. K >= 2.

    Proof. g_k = 2^p b + e_k with p in 10..20, integer b with positive first entry, |e_k| <= 9 sqrt(P), P <= 12. Each
    row is within asin(r) of b for r = |e_k| / (2^p |b|) <= 0.031, so two rows have a cosine of at least 1 - 2 r^2. The
    first entry is at least 2^10 - 9 > 0.
    """
    columns = min(12, draw(st.integers(1, count + 1)))
    base = [draw(st.integers(1, LARGEST)), *draw(_lists(-LARGEST, LARGEST, columns - 1))]
    power = draw(st.integers(10, 20))
    offsets = draw(integer_rows(-LARGEST, LARGEST, count, columns))
    return [[2**power * b + e for b, e in zip(base, row, strict=True)] for row in offsets]


@st.composite
def singular(draw: Draw, count: int) -> Integers:
    """Linearly dependent rows: duplicates, opposites and K > P among them. K >= 2. The Gramian is singular.

    Proof. The rows are C B with C of shape [K, r] and B of shape [r, P], r < K: their rank is at most r.
    """
    rank = draw(st.integers(1, count - 1))
    columns = draw(st.integers(1, count + 1))
    mixing = draw(integer_rows(-3, 3, count, rank))
    basis = draw(integer_rows(-LARGEST, LARGEST, rank, columns))
    return [[sum(c * b[j] for c, b in zip(row, basis, strict=True)) for j in range(columns)] for row in mixing]


@st.composite
def strongly_stationary(draw: Draw, count: int) -> Integers:
    """Pareto-stationary with all weights positive; no row is zero. K >= 2.

    Proof. The last row is -sum_k w_k g_k over the others with integers w_k > 0: all rows, weighted by (w, 1), sum to 0.
    """
    columns = draw(st.integers(1, count + 1))
    rows = draw(integer_rows(-LARGEST, LARGEST, count - 1, columns))
    weights = draw(_lists(1, 3, count - 1))
    last = [-sum(w * row[j] for w, row in zip(weights, rows, strict=True)) for j in range(columns)]
    complete = [*rows, last]
    assume(all(any(row) for row in complete))
    return complete


@st.composite
def strictly_weakly_stationary(draw: Draw, count: int) -> Integers:
    """Pareto-stationary, but never with all weights positive; no row is zero. K >= 3.

    Proof. Some rows have first entry 0 and are strongly stationary among themselves; their weights, and 0 for the
    others, combine all rows to 0. The others have first entries > 0: where non-negative weights combine the rows to 0,
    the first coordinate says that these have weight 0.
    """
    size = draw(st.integers(2, count - 1))
    inner = draw(strongly_stationary(size))
    outer = draw(integer_rows(-LARGEST, LARGEST, count - size, len(inner[0])))
    first = draw(_lists(1, LARGEST, count - size))
    joined = [[0, *row] for row in inner]
    joined += [[entry, *row] for entry, row in zip(first, outer, strict=True)]
    return draw(st.permutations(joined))


def _scaled(draw: Draw, rows: Integers) -> Matrix:
    """Scale rows by powers of two, the first by at most 2^-20 and the second by at least 2^20, and shuffle."""
    exponents = [draw(st.integers(-_SCALE, -_SCALE // 2)), draw(st.integers(_SCALE // 2, _SCALE))]
    exponents += draw(_lists(-_SCALE, _SCALE, len(rows) - 2))
    scaled = [[2.0**exponent * entry for entry in row] for exponent, row in zip(exponents, rows, strict=True)]
    return draw(st.permutations(scaled))


@st.composite
def ill_scaled(draw: Draw, count: int) -> Matrix:
    """Not stationary; scales between 2^-40 and 2^40 (1e-12 to 1e12), at least two of them a factor 2^40 apart. K >= 2.

    Proof. Non-stationary rows times positive factors: the same d improves all.
    """
    return _scaled(draw, draw(non_stationary(count)))


@st.composite
def ill_scaled_stationary(draw: Draw, count: int) -> Matrix:
    """Strongly stationary; scales between 2^-40 and 2^40, at least two of them a factor 2^40 apart. K >= 2.

    Proof. Strongly stationary rows times factors s_k > 0: the weights w_k / s_k combine them to 0.
    """
    return _scaled(draw, draw(strongly_stationary(count)))


@st.composite
def masked(draw: Draw, count: int) -> Integers:
    """At least one row is zero, as of an objective without signal; the others, if any, are not stationary.

    Proof. A non-empty set of non-stationary rows is set to 0. (With the zero row in it, the whole is stationary.)
    """
    rows = draw(non_stationary(count))
    dead = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    return [[0] * len(row) if gone else row for gone, row in zip(dead, rows, strict=True)]


Kind: TypeAlias = Callable[[int], st.SearchStrategy[Matrix]]

KINDS: dict[str, Kind] = {
    "non_stationary": non_stationary,
    "well_conditioned": well_conditioned,
    "conflicting": conflicting,
    "nearly_parallel": nearly_parallel,
    "singular": singular,
    "strongly_stationary": strongly_stationary,
    "strictly_weakly_stationary": strictly_weakly_stationary,
    "ill_scaled": ill_scaled,
    "ill_scaled_stationary": ill_scaled_stationary,
    "masked": masked,
}
"""Kinds of rows by name; each is a strategy of K x P lists for a given K."""

NON_STATIONARY = ("well_conditioned", "non_stationary", "conflicting", "nearly_parallel", "ill_scaled")
"""Kinds with a direction that improves every objective."""

STATIONARY = ("strongly_stationary", "strictly_weakly_stationary", "ill_scaled_stationary")
"""Kinds that are Pareto-stationary and have no zero row."""

FEWEST = {"well_conditioned": 1, "non_stationary": 1, "masked": 1, "strictly_weakly_stationary": 3}
"""Least K of a kind, where it is not 2."""


def fewest(kind: str) -> int:
    """Least number of objectives with which ``kind`` exists."""
    return FEWEST.get(kind, 2)
