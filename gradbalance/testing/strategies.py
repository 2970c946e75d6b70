"""Hypothesis strategies for rows, Gramians and cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance.testing.case import Case, product
from gradbalance.testing.kinds import KINDS, Matrix, fewest

Kinds: TypeAlias = Sequence[str] | None
Count: TypeAlias = int | tuple[int, int]


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
    main = draw(_of_kind(kind, low, high))
    count = len(main)
    others = [name for name in ("conflicting", "masked", "strongly_stationary") if fewest(name) <= count]
    earlier = draw(st.lists(rows(kinds=others, objectives=count), min_size=1, max_size=2))
    return Case(
        rows=main,
        kind=kind,
        earlier=tuple(earlier),
        scales=torch.tensor([2.0 ** draw(st.integers(-10, 10)) for _ in range(count)], dtype=torch.float64),
        factor=2.0 ** draw(st.integers(-40, 40)),
        order=tuple(draw(st.permutations(range(count)))),
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
    given = (objectives, objectives) if isinstance(objectives, int) else objectives
    if len(given) != 2 or not all(isinstance(bound, int) for bound in given) or not 1 <= given[0] <= given[1]:
        raise InvalidArgumentError(
            f"`objectives` should be a number K >= 1 or a pair (least, most) of such. Found {objectives!r}."
        )
    return given
