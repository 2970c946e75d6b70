"""Nash-MTL: the bargaining solution, solved on every ``interval``-th step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradbalance.balancers.state import check_gram_count, check_keys, checked_interval, flag, floats, saved_count, whole
from gradbalance.balancers.unit_rows import UnitRows, no_signal, unit_rows
from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance.solvers import Solution, nash


class NashMTL:
    """Weights with ``c_k (G c)_k = 1``: every objective gains the same relative amount.

    The scale of the weights is not importance: c_k goes with 1 / |g_k|, so that scaling a loss changes nothing, and the
    direction has squared norm K whatever the size of the gradients. A learning rate found for the sum of the losses
    does not carry over, and clipping the gradient norm is usual (Navon et al. clip to 1). To report shares, use
    ``coefficients``: ``c_k |g_k| / sum_j c_j |g_j|``.

    Clipping does not help a term that is added outside the balancing (``extra_loss``: a KL term, a trust region): next
    to small gradients a direction of norm sqrt(K) drowns it. With ``rescale`` the weights are those above times
    ``N / sqrt(V)``, over the V rows that are not zero, N the mean of their norms. Where a solution exists that is the
    same direction with norm N, so learning rate and extra loss keep their meaning, as with :class:`MARBLE`.

    A zero row is left out (weight 0) and the others bargain among themselves; if all are zero, all weights are 0. At a
    Pareto-stationary point no solution exists: the last good weights are kept (before any, the finite regularized
    weights of :func:`gradbalance.nash`), and ``failures`` counts the event.

    Args:
        interval: Optimizer steps between two solves, >= 1; in between the weights are reused.
        rescale: Give the direction the mean norm of the rows in place of sqrt(K).

    Attributes:
        solution: Certificate of the last solve, over the rows that are not zero; None before and after loading a state.
        failures: How many solves found no solution.

    Raises:
        InvalidArgumentError: ``interval`` is not an integer >= 1, or ``rescale`` no bool; when called, ``gram`` is no
            Gramian or K has changed.
        NonFiniteError: When called with NaN or Inf; the state stays as it was.

    References:
        Navon et al. 2022, Multi-task learning as a bargaining game, arXiv 2202.01017, claim 3.1. ``rescale`` is this
        library's.

    Example:
        >>> balancer = NashMTL()
        >>> balancer(torch.tensor([[4.0, 0.0], [0.0, 0.25]]))
        tensor([0.5000, 2.0000], dtype=torch.float64)
        >>> balancer.coefficients
        tensor([0.5000, 0.5000], dtype=torch.float64)
        >>> NashMTL(rescale=True)(torch.tensor([[4.0, 0.0], [0.0, 0.25]])) * 2**0.5  # N = 1.25
        tensor([0.6250, 2.5000], dtype=torch.float64)
    """

    def __init__(self, interval: int = 1, rescale: bool = False) -> None:
        self.interval = checked_interval(interval)
        if not isinstance(rescale, bool):
            raise InvalidArgumentError(f"`rescale` should be True or False. Found rescale = {rescale!r}.")
        self.rescale = rescale
        self.solution: Solution | None = None
        self.failures = 0
        self._weights: list[float] | None = None
        self._shares: list[float] | None = None
        self._solved = False
        self._age: int | None = None

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Solve; weights on the raw rows, shape [K], float64."""
        rows = unit_rows(gram)
        count = len(rows.norms)
        check_gram_count(count, None if self._weights is None else len(self._weights), "NashMTL")
        if not rows.valid.any():
            self.solution = no_signal(count)
            return torch.zeros(count, dtype=torch.float64)
        self.solution = nash(rows.cosines)
        self.failures += not self.solution.found
        if self.solution.found or not self._solved:
            self._take(rows, self.solution)
        self._age = 0
        return self.weights

    def _take(self, rows: UnitRows, solution: Solution) -> None:
        if self.rescale:
            weights = rows.on_raw_rows(rows.spread(solution.weights / math.sqrt(len(solution.weights))))
        else:
            weights = rows.spread(solution.weights / rows.norms[rows.valid])
        self._weights = weights.tolist()
        self._shares = rows.spread(solution.weights / solution.weights.sum()).tolist()
        self._solved = solution.found

    @property
    def needs_rows(self) -> bool:
        """Whether a solve is due: before the first one, and ``interval`` optimizer steps after the last."""
        return self._age is None or self._age >= self.interval

    @property
    def weights(self) -> Tensor:
        """The weights of the last good solve, shape [K], float64.

        Raises:
            StateError: Before the first solve.
        """
        if self._weights is None:
            raise StateError(
                "NashMTL has no weights before its first solve. Call it with a Gramian first (`needs_rows` is true)."
            )
        return torch.tensor(self._weights, dtype=torch.float64)

    @property
    def coefficients(self) -> Tensor | None:
        """Shares c_k |g_k| / sum at the last good solve, shape [K], float64, summing to 1; None before the first."""
        return None if self._shares is None else torch.tensor(self._shares, dtype=torch.float64)

    def step(self) -> None:
        """Tell that one optimizer step has been made."""
        if self._age is not None:
            self._age += 1

    def state_dict(self) -> dict[str, Any]:
        """State as plain values; JSON keeps it bit for bit."""
        return {
            "balancer": "NashMTL",
            "weights": self._weights,
            "shares": self._shares,
            "solved": self._solved,
            "age": self._age,
            "failures": self.failures,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made by ``state_dict``.

        Raises:
            StateError: A state of another balancer, of another K, or malformed. The own state then stays as it was.
        """
        check_keys(state, "NashMTL", ["weights", "shares", "solved", "age", "failures"])
        own = None if self._weights is None else len(self._weights)
        count = saved_count(state, "NashMTL", ["weights", "shares", "age"], own)
        weights, shares, age = None, None, None
        if count is not None:
            weights, shares = floats(state, "weights", count), floats(state, "shares", count)
            age = whole(state, "age")
        solved, failures = flag(state, "solved"), whole(state, "failures")
        self._weights, self._shares, self._age, self._solved, self.failures = weights, shares, age, solved, failures
        self.solution = None

    def __repr__(self) -> str:
        return f"NashMTL(interval={self.interval}, rescale={self.rescale})"
