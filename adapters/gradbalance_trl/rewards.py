"""Which rewards take part in the balancing, under which names, with which priorities; and which have gone silent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import gradbalance as gb

logger = logging.getLogger(__name__)

# Generations in a row without any difference between completions, after which a reward is reported.
PATIENCE = 20


@dataclass(frozen=True)
class BalancedRewards:
    """The rewards with a weight other than 0.

    Attributes:
        names: K distinct names.
        columns: Their places among all reward functions.
        weights: K numbers > 0.
    """

    names: tuple[str, ...]
    columns: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def preference(self) -> tuple[float, ...] | None:
        """The weights as priorities; None where all are equal."""
        return None if min(self.weights) == max(self.weights) else self.weights


def balanced_rewards(names: Sequence[str], weights: Sequence[float]) -> BalancedRewards:
    """Leave out the rewards of weight 0, and tell equal names apart.

    Args:
        names: Of all reward functions.
        weights: One per reward function.

    Raises:
        InvalidArgumentError: All weights are 0.

    >>> balanced_rewards(["math", "brevity", "math"], [2.0, 0.0, 1.0])
    BalancedRewards(names=('math', 'math_2'), columns=(0, 2), weights=(2.0, 1.0))
    """
    columns = tuple(k for k, weight in enumerate(weights) if weight > 0)
    if not columns:
        raise gb.InvalidArgumentError(
            f"`reward_weights` should have a weight > 0 for at least one of the rewards {list(names)}. Found "
            f"{list(weights)}."
        )
    distinct: list[str] = []
    for k in columns:
        name, count = names[k], 1
        while name in distinct:
            count += 1
            name = f"{names[k]}_{count}"
        distinct.append(name)
    return BalancedRewards(tuple(distinct), columns, tuple(float(weights[k]) for k in columns))


class SilenceWatch:
    """Reports, once each time, a reward under which all completions of all groups are equal for many generations.

    Such a reward has no gradient and takes no part in the balancing: a broken reward function looks the same.

    Args:
        names: K names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts = [0] * len(self.names)

    def look(self, advantages: Tensor) -> None:
        """Take note of the advantages [N, K] of one generation, over all ranks."""
        for k, silent in enumerate((advantages == 0).all(0).tolist()):
            self.counts[k] = self.counts[k] + 1 if silent else 0
            if self.counts[k] == PATIENCE:
                logger.warning(
                    "reward %r has told no completion from another for %d generations in a row: it has no gradient and "
                    "is left out of the balancing. Its function is broken, gives None, or is met by all alike.",
                    self.names[k],
                    PATIENCE,
                )
