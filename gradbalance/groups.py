"""Which balancer balances which parameters: one for all, or one per group of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance.gradients.rows import balanced_parameters
from gradbalance.solve import BalancerLike

Balancers: TypeAlias = BalancerLike | Mapping[str, BalancerLike]


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that are balanced together: they have rows, a Gramian and weights of their own.

    Attributes:
        name: Of its balancer; ``""`` for the only one.
        balancer: From the group's Gramian to its weights.
        parameters: Those that require grad.
    """

    name: str
    balancer: BalancerLike
    parameters: tuple[Tensor, ...]


def by_name(balancers: Balancers) -> dict[str, BalancerLike]:
    """The balancers by name; a single one has the name ``""``."""
    return dict(balancers) if isinstance(balancers, Mapping) else {"": balancers}


def check_balancers(balancers: Balancers) -> None:
    """Raise where something is no balancer, or serves two groups.

    Raises:
        InvalidArgumentError: It is so.
    """
    named: dict[str, Any] = by_name(balancers)
    for name, balancer in named.items():
        if not callable(balancer):
            place = f"balancer[{name!r}]" if isinstance(balancers, Mapping) else "balancer"
            raise InvalidArgumentError(
                f"{place} must be callable from a Gramian to weights, found {type(balancer).__name__}."
            )
    if not isinstance(balancers, Mapping):
        return
    if not balancers or not all(isinstance(name, str) and name for name in balancers):
        raise InvalidArgumentError(
            f"balancer given as a mapping must have names that are not empty strings, found {list(balancers)}."
        )
    owners: dict[int, str] = {}
    for name, balancer in balancers.items():
        first = owners.setdefault(id(balancer), name)
        # What is no plain function may remember, and would mix up the Gramians of two groups.
        if first != name and not inspect.isfunction(balancer):
            raise InvalidArgumentError(
                f"balancer must have an object of its own for each group, found the same {type(balancer).__name__} for "
                f"{first!r} and {name!r}; make two."
            )


def check_param_groups(balancers: Balancers, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise where ``"balanced"`` of a parameter group says something that cannot be followed.

    Raises:
        InvalidArgumentError: It is neither a bool nor the name of a balancer, or no name where there are several.
    """
    for place, group in enumerate(param_groups):
        _balancer_of(balancers, group, place)


def groups_of(balancers: Balancers, param_groups: Sequence[Mapping[str, Any]]) -> tuple[Group, ...]:
    """The groups to balance, one per balancer, in the order of the balancers.

    Args:
        balancers: One, or several by name.
        param_groups: Of an optimizer. ``"balanced"`` is False (plain gradient), True or missing (the only balancer), or
            the name of a balancer. Several parameter groups may have the same.

    Raises:
        InvalidArgumentError: A ``"balanced"`` that cannot be followed, or a balancer without parameters to balance.
    """
    members: dict[str, list[Tensor]] = {name: [] for name in by_name(balancers)}
    for place, group in enumerate(param_groups):
        name = _balancer_of(balancers, group, place)
        if name is not None:
            members[name] += group["params"]
    for name, parameters in members.items():
        if name and not any(parameter.requires_grad for parameter in parameters):
            raise InvalidArgumentError(
                f"balancer {name!r} has nothing to balance, found {len(parameters)} parameters, none of which requires "
                f'grad; give a parameter group "balanced": {name!r}, or leave this balancer out.'
            )
    return tuple(
        Group(name, balancer, balanced_parameters(members[name])) for name, balancer in by_name(balancers).items()
    )


def plain_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Parameters that require grad of groups with ``"balanced": False``, in their order."""
    plain = (group["params"] for group in param_groups if group.get("balanced", True) is False)
    return [parameter for parameters in plain for parameter in parameters if parameter.requires_grad]


def _balancer_of(balancers: Balancers, group: Mapping[str, Any], place: int) -> str | None:
    """The name of the balancer of a parameter group; None where its gradient is plain."""
    value = group.get("balanced", True)
    if value is False:
        return None
    if not isinstance(balancers, Mapping):
        if value is True:
            return ""
        raise InvalidArgumentError(
            f'param_groups[{place}]["balanced"] must be True or False with a single balancer, found {value!r}; give '
            "several as a mapping from their names, BalancedOptimizer(optimizer, {name: balancer})."
        )
    if isinstance(value, str) and value in balancers:
        return value
    raise InvalidArgumentError(
        f'param_groups[{place}]["balanced"] must name one of the balancers {list(balancers)}, or be False for the '
        f"plain gradient, found {value!r}{'' if 'balanced' in group else ' (it is missing)'}."
    )
