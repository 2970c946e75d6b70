"""MARBLE: min-norm harmonization of unit gradients, amortized over steps and smoothed over refreshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.balancers.mgda import checked_floor
from gradbalance.balancers.preference import checked_preference, priorities_for
from gradbalance.balancers.state import check_gram_count, check_keys, checked_interval, floats, saved_count, whole
from gradbalance.balancers.unit_rows import UnitRows, nearest_direction, no_signal, unit_rows
from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance.solvers import Solution


class MARBLE:
    """Balance directions by their min-norm point; solve every ``interval`` steps, use the smoothed answer in between.

    **Refresh** (a step on which rows exist). Over the valid rows, those that are not zero,

        alpha* = argmin |sum_k alpha_k g_k / |g_k||^2   subject to   alpha_k >= floor,  sum_k alpha_k = 1,

    and the weights on the raw rows are ``c_k = alpha*_k N / |g_k|`` with N the mean norm of the valid rows: the
    direction opposes no valid row and is scaled like an ordinary gradient. A row that is zero (no signal in this cycle)
    has ``alpha*_k = 0`` and weight 0.

    **Smoothing.** ``A <- rho A + (1 - rho) alpha*`` with rho = ``ema_decay``; the first solve sets ``A = alpha*``. So
    one batch without signal for an objective lowers its coefficient by the factor rho and does not silence it. An
    objective that is valid for the first time on a later refresh enters with its ``alpha*_k``, after the others have
    been scaled by one minus what the newcomers take. A stays on the simplex.

    **Shrinkage.** With s = ``shrinkage``, ``alpha*`` is drawn to equal coefficients after the solve,
    ``(1 - s) alpha* + s / V`` over the V valid rows (with a preference, to the shares of priorities). The solve gives
    0 to a row that gains along with the others, which in a small batch may be chance: where objectives truly conflict,
    shrinking lets fewer batches oppose an expected gradient. In return a row of the batch itself may be opposed.

    **Other steps** use one backward pass with cached weights. ``amortize="direction"`` takes ``c_k = A_k N / |g_k|``,
    with each row's norm from the last refresh on which it was valid, so the step follows the direction that was solved
    for. ``amortize="coefficients"``, as published, takes c = A and lets the raw norms decide.

    **Uniform stage.** From optimizer step ``uniform_after`` on (the first is 0), ``alpha*`` is 1/V over the V valid
    rows in place of the solve, A stays as it was, and cached weights are uniform over the objectives that were ever
    valid. Refreshes go on, to keep norms fresh; with ``amortize="coefficients"``, which caches no norms, they end.

    **Preference.** With priorities p, ``alpha*`` comes from the min-norm problem of the rows ``g_k / (|g_k| p_k)``: its
    weights, divided by p, on the simplex again. On a refresh the direction d then has, for ``P = sum_j alpha*_j p_j``,

        <d, g_k / |g_k|> = (p_k / P) |d|^2 / N      for every k with alpha*_k > 0, and no less for the others:

    relative gains, to first order, go with the priorities, and their ratios alone matter. Scale, smoothing and cached
    weights are as above: A averages ``alpha*``, not the weights before division, so it still holds coefficients of unit
    rows, whatever the preference was when they were solved for. ``floor`` bounds ``alpha*`` itself. In the uniform
    stage coefficients go with the priorities. Zero rows take no part, and the others keep their ratios.

    If all rows are zero, the weights are 0, ``solution.reason`` says so, nothing is stored, and the refresh stays due.

    Args:
        interval: Optimizer steps between two refreshes, >= 1.
        ema_decay: rho, in [0, 1).
        amortize: What is cached between refreshes, ``"direction"`` or ``"coefficients"``.
        floor: Lower bound on ``alpha*`` of each valid row, in [0, 1/K].
        uniform_after: Optimizer step from which on coefficients are uniform; None for never.
        preference: One priority > 0 per objective, in the order of the losses; None for equal ones.
        shrinkage: s, in [0, 1).

    Attributes:
        solution: Certificate of the last solve, over its valid rows; None before the first and after loading a state.

    Raises:
        InvalidArgumentError: An argument is out of its range; when called, ``gram`` is no Gramian or K has changed.
        NonFiniteError: When called with NaN or Inf; the state stays as it was.

    References:
        MARBLE, arXiv 2605.06507 (normalization, min-norm solve, rescaling, amortization and smoothing of the
        coefficients). Caching the direction in place of the coefficients, and shrinkage, are this library's.

    Example:
        >>> balancer = MARBLE(interval=2, ema_decay=0.5)
        >>> balancer(torch.tensor([[1.0, 0.0], [0.0, 9.0]]))  # refresh: alpha* = 1/2 each, N = 2
        tensor([1.0000, 0.3333], dtype=torch.float64)
        >>> balancer.step()
        >>> balancer.needs_rows, balancer.weights
        (False, tensor([1.0000, 0.3333], dtype=torch.float64))
    """

    def __init__(
        self,
        interval: int = 10,
        ema_decay: float = 0.7,
        amortize: Literal["direction", "coefficients"] = "direction",
        floor: float = 0.0,
        uniform_after: int | None = None,
        preference: Iterable[float] | None = None,
        shrinkage: float = 0.0,
    ) -> None:
        self.interval = checked_interval(interval)
        if not 0.0 <= ema_decay < 1.0:
            raise InvalidArgumentError(f"`ema_decay` should be in [0, 1). Found ema_decay = {ema_decay!r}.")
        self.ema_decay = float(ema_decay)
        if amortize not in ("direction", "coefficients"):
            raise InvalidArgumentError(
                f'`amortize` should be "direction" or "coefficients". Found amortize = {amortize!r}.'
            )
        self.amortize = amortize
        self.floor = checked_floor(floor)
        if uniform_after is not None and (
            isinstance(uniform_after, bool) or not isinstance(uniform_after, int) or uniform_after < 0
        ):
            raise InvalidArgumentError(
                f"`uniform_after` should be an optimizer step >= 0, or None. Found uniform_after = {uniform_after!r}."
            )
        self.uniform_after = uniform_after
        self.preference = checked_preference(preference)
        if not 0.0 <= shrinkage < 1.0:
            raise InvalidArgumentError(f"`shrinkage` should be in [0, 1). Found shrinkage = {shrinkage!r}.")
        self.shrinkage = float(shrinkage)
        self.solution: Solution | None = None
        self._average: NDArray[np.float64] | None = None
        self._latest: NDArray[np.float64] | None = None
        self._norms: NDArray[np.float64] | None = None
        self._mean_norm = 0.0
        self._age: int | None = None
        self._steps = 0

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Refresh: weights on the raw rows, shape [K], float64, from their Gramian."""
        rows = unit_rows(gram)
        count = len(rows.norms)
        check_gram_count(count, None if self._norms is None else len(self._norms), "MARBLE")
        priorities = priorities_for(self.preference, count)
        if not rows.valid.any():
            self.solution = no_signal(count)
            return torch.zeros(count, dtype=torch.float64)
        if self._uniform:
            alpha = _uniform_over(rows.valid, priorities)
        else:
            alpha, self.solution = nearest_direction(rows, self.floor, priorities)
            if self.shrinkage:
                alpha = (1.0 - self.shrinkage) * alpha + self.shrinkage * _uniform_over(rows.valid, priorities)
            self._average = self._smoothed(alpha, rows)
        self._latest = alpha
        self._norms = np.where(rows.valid, rows.norms, 0.0 if self._norms is None else self._norms)
        self._mean_norm = rows.mean_norm
        self._age = 0
        return torch.from_numpy(rows.on_raw_rows(alpha))

    def _smoothed(self, alpha: NDArray[np.float64], rows: UnitRows) -> NDArray[np.float64]:
        if self._average is None or self._norms is None:
            return alpha
        entering = np.where(self._norms == 0.0, alpha, 0.0)
        average = (1.0 - entering.sum()) * self._average + entering
        smoothed = self.ema_decay * average + (1.0 - self.ema_decay) * alpha
        normalized: NDArray[np.float64] = smoothed / smoothed.sum()
        return normalized

    @property
    def _uniform(self) -> bool:
        return self.uniform_after is not None and self._steps >= self.uniform_after

    def _cached_alpha(self) -> NDArray[np.float64] | None:
        if self._norms is None:
            return None
        if self._uniform or self._average is None:
            return _uniform_over(self._norms > 0.0, priorities_for(self.preference, len(self._norms)))
        return self._average

    @property
    def needs_rows(self) -> bool:
        """Whether a refresh is due: before the first one, and ``interval`` optimizer steps after the last."""
        if self._age is None:
            return True
        return self._age >= self.interval and not (self._uniform and self.amortize == "coefficients")

    @property
    def weights(self) -> Tensor:
        """Weights on the raw losses for a step without refresh, shape [K], float64.

        Raises:
            StateError: Before the first refresh.
        """
        alpha = self._cached_alpha()
        if alpha is None or self._norms is None:
            raise StateError(
                "MARBLE has no weights before its first refresh. Call it with a Gramian first (`needs_rows` is true)."
            )
        if self.amortize == "coefficients":
            return torch.tensor(alpha)
        seen = self._norms > 0.0
        cached = np.zeros(len(alpha))
        cached[seen] = alpha[seen] * (self._mean_norm / self._norms[seen])
        return torch.from_numpy(cached)

    @property
    def coefficients(self) -> Tensor | None:
        """Simplex numbers behind the weights in use, shape [K], float64; None before the first refresh.

        alpha* on the step of a refresh, its smoothed form after it.
        """
        alpha = self._latest if self._age == 0 else self._cached_alpha()
        return None if alpha is None else torch.tensor(alpha)

    def step(self) -> None:
        """Tell that one optimizer step has been made."""
        self._steps += 1
        if self._age is not None:
            self._age += 1

    def state_dict(self) -> dict[str, Any]:
        """State as plain values; JSON keeps it bit for bit. Arguments of the constructor are not part of it."""
        return {
            "balancer": "MARBLE",
            "average": None if self._average is None else self._average.tolist(),
            "latest": None if self._latest is None else self._latest.tolist(),
            "norms": None if self._norms is None else self._norms.tolist(),
            "mean_norm": self._mean_norm,
            "age": self._age,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made by ``state_dict``.

        Raises:
            StateError: A state of another balancer, of another K, or malformed. The own state then stays as it was.
        """
        check_keys(state, "MARBLE", ["average", "latest", "norms", "mean_norm", "age", "steps"])
        own = self._norms if self._norms is not None else self.preference
        count = saved_count(state, "MARBLE", ["norms", "latest", "age"], None if own is None else len(own))
        norms, latest, average, age = None, None, None, None
        if count is not None:
            norms, latest = np.array(floats(state, "norms", count)), np.array(floats(state, "latest", count))
            # Uniform coefficients from the first step on leave no average.
            average = None if state["average"] is None else np.array(floats(state, "average", count))
            age = whole(state, "age")
        (mean_norm,) = floats({"mean_norm": [state["mean_norm"]]}, "mean_norm", 1)
        steps = whole(state, "steps")
        self._norms, self._latest, self._average, self._mean_norm = norms, latest, average, mean_norm
        self._age, self._steps, self.solution = age, steps, None

    def __repr__(self) -> str:
        preference = None if self.preference is None else list(self.preference)
        return (
            f"MARBLE(interval={self.interval}, ema_decay={self.ema_decay}, amortize={self.amortize!r}, "
            f"floor={self.floor}, uniform_after={self.uniform_after}, preference={preference}, "
            f"shrinkage={self.shrinkage})"
        )


def _uniform_over(members: NDArray[np.bool_], priorities: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Coefficients in proportion to the priorities, 0 for what is no member."""
    if priorities is None:
        return members / np.count_nonzero(members)
    shares = np.where(members, priorities / priorities.max(), 0.0)
    uniform: NDArray[np.float64] = shares / shares.sum()
    return uniform
