"""From a configured method to a balancer, and the scalar-reward baseline that needs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import gradbalance as gb

from .config import BalanceConfig
from .rewards.base import RewardTable

WEIGHTED_SUM = "weighted-sum"
CONFLICT_GROUPS = 8
"""Groups of batches in a ConflictMeter, whose memory goes with them. Its errors are then known to about a quarter."""


def make_balancer(
    config: BalanceConfig, method: str | None = None, objectives: Sequence[str] | None = None
) -> gb.Balancer:
    """The balancer of ``config.method`` (or of ``method``, which a stage may set).

    ``objectives`` are the names of what is balanced, in order; ``config.preference`` goes by them.

    * ``"marble"``: :class:`gradbalance.MARBLE`, the paper's method.
    * ``"mgda"``: the min-norm point of the normalized rows, solved afresh on every step, no memory.
    * ``"mgda-raw"``: the same of the rows as they are, for comparison: the shortest row gets the largest weight.
    * ``"nash"``: :class:`gradbalance.NashMTL`, solved every ``interval`` steps; rescaled, since the common part of the
      loss and the KL term stay outside the balancing.
    * ``"mean"``: fixed 1/K on losses of separately normalized advantages.
    * ``"weighted-sum"``: the rewards are summed before the advantage (one objective), so nothing is left to balance.
    """
    method = method or config.method
    preference = None
    if config.preference and objectives is not None:
        preference = [config.preference.get(name, 1.0) for name in objectives]
    if method == "marble":
        return gb.MARBLE(
            interval=config.interval,
            ema_decay=config.ema_decay,
            amortize=config.amortize,
            floor=config.floor,
            uniform_after=config.uniform_after,
            preference=preference,
            shrinkage=config.shrinkage,
        )
    if method in ("mgda", "mgda-raw"):
        return gb.MGDA(normalize=method == "mgda", floor=config.floor, preference=preference)
    if method == "nash":
        return gb.NashMTL(interval=config.interval, rescale=True)
    if method == "mean":
        return Observed(gb.Mean(), config.interval)
    if method == WEIGHTED_SUM:
        return gb.Mean()
    raise gb.InvalidArgumentError(
        f"`balance.method` must be one of marble, mgda, mgda-raw, nash, mean, weighted-sum. Found {method!r}."
    )


def conflict_meter(config: BalanceConfig) -> gb.ConflictMeter | None:
    """What estimates from the rows of refreshes which rewards conflict, in host memory; None if not asked for."""
    return gb.ConflictMeter(groups=CONFLICT_GROUPS, device="cpu") if config.measure_conflicts else None


class Observed:
    """A constant balancer with rows collected every ``interval`` steps all the same, to log a baseline's cosines.

    >>> balancer = Observed(gb.Mean(), interval=2)
    >>> balancer.needs_rows, balancer(torch.eye(2)).tolist()
    (True, [0.5, 0.5])
    >>> balancer.step()
    >>> balancer.needs_rows, balancer.weights.tolist()
    (False, [0.5, 0.5])
    """

    def __init__(self, balancer: gb.ConstantBalancer, interval: int) -> None:
        self.balancer, self.interval = balancer, interval
        self._count = self._age = 0

    def __call__(self, gram: Tensor, /) -> Tensor:
        """The constant weights."""
        self._count, self._age = gram.shape[0], 0
        return self.balancer(gram)

    @property
    def needs_rows(self) -> bool:
        """Whether the rows are to be looked at again."""
        return self._count == 0 or self._age >= self.interval

    @property
    def weights(self) -> Tensor:
        """The constant weights."""
        return self.balancer.weights_for(self._count)

    @property
    def coefficients(self) -> Tensor | None:
        """The constant weights; None before the first rows."""
        return self.weights if self._count else None

    def step(self) -> None:
        """One optimizer step has been made."""
        self._age += 1

    def state_dict(self) -> dict[str, int]:
        """Where in the interval it is."""
        return {"count": self._count, "age": self._age}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from :meth:`state_dict`."""
        self._count, self._age = state["count"], state["age"]


def weighted_sum(table: RewardTable, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    r"""One scalar reward per sample, as DiffusionNFT trains on.

    .. math:: \bar R_i = \sum_k w_k m_{ik} R_{ik} \big/ \sum_k w_k m_{ik}

    over the rewards that are defined for sample i: a weight whose reward does not apply is shared out, so a missing
    reward neither counts as zero nor shrinks the others.

    Args:
        table: R ``[B, K]`` and its mask.
        weights: A non-negative weight per reward name; a name that is left out has weight 1.

    Returns:
        ``values [B, 1]`` (float64, NaN where no weighted reward applies) and ``mask [B, 1]``.
    """
    unknown = sorted(set(weights) - set(table.names))
    if unknown:
        raise gb.InvalidArgumentError(
            f"`balance.reward_weights` names {unknown}, which are not among the rewards {list(table.names)}. "
            "Correct the names or add the rewards."
        )
    w = torch.tensor([float(weights.get(name, 1.0)) for name in table.names], dtype=torch.float64)
    if bool((w < 0).any()):
        raise gb.InvalidArgumentError(f"`balance.reward_weights` must be non-negative. Found {dict(weights)}.")
    share = w * table.mask.to(torch.float64)
    total = share.sum(dim=1, keepdim=True)
    value = (share * torch.nan_to_num(table.values.to(torch.float64))).sum(dim=1, keepdim=True) / total
    return value, total > 0
