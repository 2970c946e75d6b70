"""The errors this library raises on purpose. Catch ``GradBalanceError`` to catch them all."""

from __future__ import annotations

from collections.abc import Sequence


class GradBalanceError(Exception):
    """Base of every error raised by gradbalance and its adapters."""


class InvalidArgumentError(GradBalanceError, ValueError):
    """An argument breaks a rule. The message names the parameter, the rule, what was found and the remedy."""


class NonFiniteError(GradBalanceError, ArithmeticError):
    """NaN or Inf where finite numbers are needed.

    Attributes:
        objectives: Names of the objectives that are not finite, in the order of the losses.
    """

    def __init__(self, message: str, objectives: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.objectives = tuple(objectives)


class CollectorError(GradBalanceError, RuntimeError):
    """Per-objective gradients cannot be collected, or two ways of collecting them disagree."""


class StateError(GradBalanceError, RuntimeError):
    """Calls in an order that has no meaning, or a state_dict that does not fit."""


class RanksError(GradBalanceError, RuntimeError):
    """Processes that should train one model are set up in different ways, or out of step. Every rank raises it."""


class MissingDependencyError(GradBalanceError, ImportError):
    """An optional package is not installed. The message names the command that installs it."""
