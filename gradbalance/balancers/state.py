"""Checks that the stateful balancers share: intervals, and the form of a state_dict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gradbalance.errors import InvalidArgumentError, StateError


def checked_interval(interval: int) -> int:
    """Return ``interval``, a count of optimizer steps >= 1."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise InvalidArgumentError(
            f"`interval` should be an integer >= 1 (optimizer steps). Found interval = {interval!r}."
        )
    return interval


def check_keys(state: dict[str, Any], balancer: str, expected: Sequence[str]) -> None:
    """Refuse a state of another balancer, or with missing or unknown keys."""
    found = state.get("balancer")
    if found != balancer:
        raise StateError(
            f"The state should be one of {balancer}. Found a state of {found!r}. Build the balancer that was saved."
        )
    wanted = set(expected) | {"balancer"}
    missing, unknown = sorted(wanted - state.keys()), sorted(state.keys() - wanted)
    if missing or unknown:
        raise StateError(
            f"The state of {balancer} should hold {sorted(wanted)}. Missing: {missing}; unknown: {unknown}."
        )


def saved_count(state: dict[str, Any], balancer: str, lists: Sequence[str], own: int | None) -> int | None:
    """Read K from a state: the length of its first list, or None where all of ``lists`` are None (nothing solved yet).

    Raises:
        StateError: Some are None and others not, the first is no list, or K is not ``own``.
    """
    empty = [state[key] is None for key in lists]
    if all(empty):
        return None
    first = state[lists[0]]
    if any(empty) or not isinstance(first, list):
        found = {key: state[key] for key in lists}
        raise StateError(
            f"{', '.join(lists)} in the state of {balancer} should be set together, or all be None. Found {found}."
        )
    if own is not None and len(first) != own:
        raise StateError(f"The state of {balancer} should be for K = {own} objectives. Found one for K = {len(first)}.")
    return len(first)


def check_gram_count(found: int, own: int | None, balancer: str) -> None:
    """Refuse a Gramian for another number of objectives than before."""
    if own is not None and found != own:
        raise InvalidArgumentError(
            f"`gram` should have K = {own} objectives, as on the steps before. Found K = {found}. Build a new "
            f"{balancer} for a new set of objectives; an objective without signal is a zero row, not a missing one."
        )


def floats(state: dict[str, Any], key: str, count: int) -> list[float]:
    """Read a list of ``count`` finite numbers >= 0."""
    values = state[key]
    if not isinstance(values, list) or len(values) != count or not all(_is_amount(value) for value in values):
        raise StateError(f"`{key}` in the state should be a list of {count} finite numbers >= 0. Found {values!r}.")
    return [float(value) for value in values]


def whole(state: dict[str, Any], key: str) -> int:
    """Read an integer >= 0."""
    value = state[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"`{key}` in the state should be an integer >= 0. Found {value!r}.")
    return value


def flag(state: dict[str, Any], key: str) -> bool:
    """Read true or false."""
    value = state[key]
    if not isinstance(value, bool):
        raise StateError(f"`{key}` in the state should be true or false. Found {value!r}.")
    return value


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
