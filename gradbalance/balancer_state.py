"""Saving and loading the states of the balancers of an optimizer, all of them or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gradbalance.errors import StateError
from gradbalance.groups import Balancers, by_name
from gradbalance.solve import BalancerLike


def classes_of(balancers: Balancers) -> str | dict[str, str]:
    """The class of the balancer, or of each by name: a state fits no other."""
    if not isinstance(balancers, Mapping):
        return type(balancers).__name__
    return {name: type(balancer).__name__ for name, balancer in balancers.items()}


def states_of(balancers: Balancers) -> Any:
    """The state of the balancer, or of each by name; None for one without."""
    if not isinstance(balancers, Mapping):
        return _state_of(balancers)
    return {name: _state_of(balancer) for name, balancer in balancers.items()}


def check_classes(balancers: Balancers, saved: Any) -> None:
    """Raise where a state was saved by balancers of other names or classes.

    Raises:
        StateError: It was.
    """
    found = classes_of(balancers)
    if isinstance(saved, Mapping) or isinstance(found, dict):
        if saved != found:
            raise StateError(f"state_dict holds the states of balancers {saved}, but the balancers are {found}.")
    elif saved != found:
        raise StateError(f"state_dict holds the state of balancer {saved}, but the balancer is {found}.")


@contextmanager
def loaded_states(balancers: Balancers, saved: Any) -> Iterator[None]:
    """Load what :func:`states_of` gave, and take all of it back where that or the body raises.

    Raises:
        StateError: A balancer refuses its state.
    """
    named = by_name(balancers)
    states = saved if isinstance(balancers, Mapping) else {"": saved}
    if not isinstance(states, Mapping) or set(states) != set(named):
        raise StateError(f"state_dict must hold a state for each of the balancers {list(named)}, found {states!r}.")
    # Copied: the state of a torch module is made of its live tensors.
    before = copy.deepcopy({name: _state_of(balancer) for name, balancer in named.items()})
    try:
        for name, balancer in named.items():
            _load(balancer, states[name])
        yield
    except Exception:
        for name, balancer in named.items():
            # One that fails half-way may refuse its own state too, and its error is the one to show.
            with suppress(StateError):
                _load(balancer, before[name])
        raise


def _state_of(balancer: BalancerLike) -> Any:
    keep = getattr(balancer, "state_dict", None)
    return None if keep is None else keep()


def _load(balancer: BalancerLike, state: Any) -> None:
    if state is None:
        return
    try:
        balancer.load_state_dict(state)  # type: ignore[attr-defined]
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"the balancer {type(balancer).__name__} does not take the state that was saved from one of its class: "
            f"{error}"
        ) from error
