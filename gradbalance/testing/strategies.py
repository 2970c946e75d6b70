"""Hypothesis strategies for rows, Gramians and cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance.testing.case import Case, product
from gradbalance.testing.kinds import KINDS, LARGEST, Matrix, fewest, integer_rows

Kinds: TypeAlias = Sequence[str] | None
Count: TypeAlias = int | tuple[int, int]
# Of earlier steps: few enough that their rows often conflict and are sometimes dependent.
_COLUMNS = 4


def rows(*, kinds: Kinds = None, objectives: Count = (1, 6)) -> st.SearchStrategy[Tensor]:
    """Rows of one of several kinds whose geometry is proved.

    Args:
        kinds: Names from :data:`~gradbalance.testing.KINDS`, each explained there; None for all that exist with so many
            objectives.
        objectives: K, or the least and the most K.

    Returns:
        A strategy of tensors [K, P], float64, made of integers or (in ill-scaled kinds) of integers times powers of
        two, so that their Gramian is exact. It shrinks to few and small entries.

    Raises:
        InvalidArgumentError: An unknown kind, or one that needs more objectives than allowed.

    >>> from hypothesis import find
    >>> find(rows(kinds=["conflicting"]), lambda r: True)
    tensor([[ 1.,  1.],
            [ 1., -2.]], dtype=torch.float64)
    """
    low, high = _range(objectives)
    return st.sampled_from(known_kinds(kinds, objectives)).flatmap(lambda kind: _of_kind(kind, low, high))


def grams(*, kinds: Kinds = None, objectives: Count = (1, 6)) -> st.SearchStrategy[Tensor]:
    """Gramians of :func:`rows`: float64 [K, K], exact, so what is proved of the rows is true of them.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=10, database=None)
    ... @given(grams(kinds=["singular"], objectives=3))
    ... def ranks(gram):
    ...     assert torch.linalg.matrix_rank(gram) < 3
    >>> ranks()
    """
    return rows(kinds=kinds, objectives=objectives).map(product)


@st.composite
def cases(draw: st.DrawFn, *, kinds: Kinds, objectives: Count, tolerance: float) -> Case:
    """Rows, and all that the invariants need around them."""
    low, high = _range(objectives)
    kind = draw(st.sampled_from(known_kinds(kinds, objectives)))
    # What goes with K is drawn for the most K and cut, and K last: hypothesis can then shrink K by itself.
    exponents = draw(st.lists(st.integers(-10, 10), min_size=high, max_size=high))
    factor = 2.0 ** draw(st.integers(-40, 40))
    order = draw(st.permutations(range(high)))
    earlier = [draw(integer_rows(-LARGEST, LARGEST, high, _COLUMNS)) for _ in range(draw(st.integers(1, 2)))]
    main = draw(_of_kind(kind, low, high))
    count = len(main)
    return Case(
        rows=main,
        kind=kind,
        earlier=tuple(torch.tensor(matrix[:count], dtype=torch.float64) for matrix in earlier),
        scales=2.0 ** torch.tensor(exponents[:count], dtype=torch.float64),
        factor=factor,
        order=tuple(place for place in order if place < count),
        tolerance=tolerance,
    )


def known_kinds(kinds: Kinds, objectives: Count) -> list[str]:
    """The kinds asked for; if None, all that exist with so many objectives.

    Raises:
        InvalidArgumentError: See :func:`rows`.
    """
    _, high = _range(objectives)
    if kinds is None:
        return [kind for kind in KINDS if fewest(kind) <= high]
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise InvalidArgumentError(f"`kinds` should be a sequence of names among {list(KINDS)}. Found {kinds!r}.")
    for kind in kinds:
        if fewest(kind) > high:
            raise InvalidArgumentError(
                f"`objectives` should allow {fewest(kind)} objectives, which kind {kind!r} needs. Found {objectives!r}."
            )
    return list(kinds)


def _of_kind(kind: str, low: int, high: int) -> st.SearchStrategy[Tensor]:
    def matrix(count: int) -> st.SearchStrategy[Matrix]:
        return KINDS[kind](count)

    return (
        st.integers(max(low, fewest(kind)), high)
        .flatmap(matrix)
        .map(lambda entries: torch.tensor(entries, dtype=torch.float64))
    )


def _range(objectives: Count) -> tuple[int, int]:
    pair = objectives if isinstance(objectives, tuple) else (objectives, objectives)
    whole = len(pair) == 2 and all(isinstance(bound, int) and not isinstance(bound, bool) for bound in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        raise InvalidArgumentError(
            f"`objectives` should be a number K >= 1 or a pair (least, most) of such. Found {objectives!r}."
        )
    return pair
