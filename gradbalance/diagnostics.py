"""Numbers to log from a BalanceInfo, and how often objectives conflict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance.gramian import cosines
from gradbalance.info import BalanceInfo


def summary(info: BalanceInfo) -> dict[str, float | bool | str]:
    """A flat dict for loggers.

    Always: ``refreshed``, ``overflow``, ``skipped``, ``inactive`` (a count), and per objective ``loss/NAME`` and
    ``weight/NAME``, and ``coefficient/NAME`` where the balancer has coefficients. On steps with rows also
    ``collector``, ``norm/NAME``, ``cosine/NAME`` (of the written direction with the row), their ``worst_cosine`` and
    ``mean_cosine`` over objectives with a row that is not zero, ``worst_pair_cosine`` (the least cosine between two
    rows) and ``conflict`` (it is below zero). With several balancers, weights, coefficients, norms and cosines of each
    group are logged too, as ``weight/GROUP/NAME`` and so on; those without a group are of whole rows.

    >>> info = BalanceInfo(("a", "b"), torch.ones(2), torch.zeros(2), torch.ones(2, dtype=torch.bool), refreshed=False)
    >>> summary(info)["weight/b"]
    1.0
    """
    logged: dict[str, float | bool | str] = {
        "refreshed": info.refreshed,
        "overflow": info.overflow,
        "skipped": bool(info.skipped),
        "inactive": len(info.inactive),
    }
    logged.update((f"loss/{name}", value) for name, value in info.losses.items())
    for prefix, own in [("", info), *((f"{group}/", own) for group, own in info.groups.items())]:
        if not own.groups:
            logged.update(_named(f"weight/{prefix}", info, own.weights))
        if own.coefficients is not None:
            logged.update(_named(f"coefficient/{prefix}", info, own.coefficients))
        if own.norms is not None and own.cosines is not None and not own.overflow:
            logged.update(_named(f"norm/{prefix}", info, own.norms))
            logged.update(_named(f"cosine/{prefix}", info, own.cosines))
    if info.gram is None or info.norms is None or info.cosines is None or info.overflow:
        return logged
    logged["collector"] = info.collector or ""
    alive = info.norms > 0
    if alive.any():
        logged["worst_cosine"] = info.cosines[alive].min().item()
        logged["mean_cosine"] = info.cosines[alive].mean().item()
    pairs = _pairs(info.gram)
    if len(pairs):
        logged["worst_pair_cosine"] = pairs.min().item()
        logged["conflict"] = bool(pairs.min() < 0)
    return logged


class ConflictRate:
    """How often the rows of two objectives point against each other: the share of steps with a negative cosine.

    Steps without rows and overflows are left out, and a pair counts only where both rows are not zero. A cosine of
    gradients of one batch is a noisy number: its sign is that of the expected gradients only if the batch is large.

    Attributes:
        names: K objectives, from the first info; None before.
        conflicts: int64 [K, K], how often the cosine was negative.
        steps: int64 [K, K], how often it was defined.

    >>> rate = ConflictRate()
    >>> gram = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    >>> one = torch.ones(2)
    >>> rate.update(BalanceInfo(("a", "b"), one, one, one > 0, True, gram=gram, norms=one, cosines=one))
    >>> rate.rate()[0, 1].item(), rate.overall()
    (1.0, 1.0)
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        self.conflicts = torch.zeros(0, 0, dtype=torch.int64)
        self.steps = torch.zeros(0, 0, dtype=torch.int64)

    def update(self, info: BalanceInfo) -> None:
        """Count one step.

        Raises:
            InvalidArgumentError: Other objectives than before.
        """
        if self.names is None:
            self.names = info.names
            self.conflicts = torch.zeros(len(info.names), len(info.names), dtype=torch.int64)
            self.steps = torch.zeros_like(self.conflicts)
        if info.names != self.names:
            raise InvalidArgumentError(f"info must be of objectives {self.names}, found {info.names}.")
        if info.gram is None or info.overflow:
            return
        cosine = cosines(info.gram)
        alive = cosine.diagonal() > 0
        defined = alive[:, None] & alive & ~torch.eye(len(alive), dtype=torch.bool)
        self.steps += defined
        self.conflicts += defined & (cosine < 0)

    def rate(self) -> Tensor:
        """Float64 [K, K] shares; NaN where a pair was never seen, the diagonal included."""
        return self.conflicts.double() / self.steps.double()

    def overall(self) -> float:
        """The share over all pairs and steps together; NaN before the first."""
        return float(self.conflicts.sum().double() / self.steps.sum().double())

    def state_dict(self) -> dict[str, Any]:
        """Plain lists, fit for JSON."""
        return {
            "names": None if self.names is None else list(self.names),
            "conflicts": self.conflicts.tolist(),
            "steps": self.steps.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            StateError: Keys are missing or unknown.
        """
        if set(state) != {"names", "conflicts", "steps"}:
            raise StateError(f"state of ConflictRate must have keys names, conflicts, steps, found {sorted(state)}.")
        self.names = None if state["names"] is None else tuple(state["names"])
        count = 0 if self.names is None else len(self.names)
        self.conflicts = torch.tensor(state["conflicts"], dtype=torch.int64).reshape(count, count)
        self.steps = torch.tensor(state["steps"], dtype=torch.int64).reshape(count, count)


def _named(prefix: str, info: BalanceInfo, values: Tensor) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in zip(info.names, values.tolist(), strict=True)}


def _pairs(gram: Tensor) -> Tensor:
    """Cosines of all pairs of rows that are not zero."""
    cosine = cosines(gram)
    alive = cosine.diagonal() > 0
    both = (alive[:, None] & alive).triu(diagonal=1)
    return cosine[both]
