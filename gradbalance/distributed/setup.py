"""What of an optimizer's set-up has to be the same on all ranks, or they drift apart or wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradbalance.balancer_state import classes_of, states_of
from gradbalance.groups import Balancers, Group, by_name
from gradbalance.solve import needs_rows


def facts_of(
    optimizer: torch.optim.Optimizer, balancers: Balancers, groups: Sequence[Group], options: Mapping[str, object]
) -> dict[str, Any]:
    """For :func:`~gradbalance.distributed.agreement.agree`: plain values, by the names that its errors give them.

    Args:
        optimizer: The wrapped one; its class and the numbers and words in its parameter groups are told.
        balancers: As given by the user.
        groups: The same, with their parameters.
        options: Further settings that decide what is exchanged.
    """
    return {
        "balancers": classes_of(balancers),
        "arguments of the balancers": [_without_address(balancer) for balancer in by_name(balancers).values()],
        "options of BalancedOptimizer": dict(options),
        "settings of the optimizer": [type(optimizer).__name__, *map(_settings, optimizer.param_groups)],
        "rows are due": [needs_rows(group.balancer) for group in groups],
        "states of the balancers": repr(states_of(balancers)),
    }


def _without_address(balancer: object) -> str:
    """The balancer as it prints, which tells its arguments; its class where that has a place in memory in it."""
    printed = repr(balancer)
    return type(balancer).__name__ if " at 0x" in printed else printed


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple)
    return {name: repr(value) for name, value in group.items() if isinstance(value, plain)}
