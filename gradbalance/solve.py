"""Asking a balancer: any callable from Gramian to weights, with or without memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, NonFiniteError


class BalancerLike(Protocol):
    """From a Gramian [K, K] (float64, CPU) to K weights. Stateful ones add what ``StatefulBalancer`` lists."""

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Weights [K] on the raw rows."""
        ...


def needs_rows(balancer: BalancerLike) -> bool:
    """Must the next step collect rows? Always, for a balancer without memory, unless its weights are constant."""
    if hasattr(balancer, "weights_for"):
        return False
    return bool(getattr(balancer, "needs_rows", True))


def solve(balancer: BalancerLike, gram: Tensor) -> Tensor:
    """The balancer's weights, checked: float64 [K] on the CPU.

    Raises:
        InvalidArgumentError: The balancer returned something else than K numbers.
        NonFiniteError: It returned NaN or Inf for a finite Gramian.
    """
    with torch.no_grad():
        weights = balancer(gram)
    return _checked(balancer, weights, gram.shape[0])


def cached_weights(balancer: BalancerLike, objectives: int) -> Tensor:
    """Weights of a constant balancer, or those a stateful one keeps; checked as in :func:`solve`."""
    constant = getattr(balancer, "weights_for", None)
    weights = _attribute(balancer, "weights") if constant is None else constant(objectives)
    return _checked(balancer, weights, objectives)


def coefficients_of(balancer: BalancerLike) -> Tensor | None:
    """The simplex coefficients a balancer reports, if it does."""
    coefficients = getattr(balancer, "coefficients", None)
    return None if coefficients is None else torch.as_tensor(coefficients).detach().clone()


def count_step(balancer: BalancerLike) -> None:
    """Tell a stateful balancer that one optimizer step has been made."""
    if hasattr(balancer, "needs_rows"):
        _attribute(balancer, "step")()


def _attribute(balancer: BalancerLike, name: str) -> Any:
    if not hasattr(balancer, name):
        raise InvalidArgumentError(
            f"balancer {type(balancer).__name__} has needs_rows but no {name}; a stateful balancer has needs_rows, "
            "weights, step, state_dict and load_state_dict."
        )
    return getattr(balancer, name)


def _checked(balancer: BalancerLike, given: Any, objectives: int) -> Tensor:
    if not isinstance(given, Tensor) or given.shape != (objectives,):
        found = f"shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InvalidArgumentError(
            f"balancer {type(balancer).__name__} must give a tensor of {objectives} weights, one per objective, found "
            f"{found}; a balancer that keeps state serves one number of objectives."
        )
    weights: Tensor = given.detach().to("cpu", torch.float64)
    if not torch.isfinite(weights).all():
        raise NonFiniteError(
            f"balancer {type(balancer).__name__} gave weights {weights.tolist()} for a finite Gramian."
        )
    return weights
