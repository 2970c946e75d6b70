"""Scores of samples under several rewards, never averaged over the rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


@dataclass(frozen=True)
class RewardTable:
    """Scores of B samples under K rewards.

    Attributes:
        names: K reward names.
        values: ``[B, K]`` float64 on the CPU, NaN where a reward is missing.
        mask: ``[B, K]`` bool, where a reward is defined.
        lost: ``[B, K]`` bool, where a score was lost: all samples of a call that failed or timed out, and those that a
            reward gave up itself (:class:`LostScore`). Left out: nowhere.
    """

    names: tuple[str, ...]
    values: Tensor
    mask: Tensor
    lost: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    def __post_init__(self) -> None:
        if not self.lost.numel():
            object.__setattr__(self, "lost", torch.zeros_like(self.mask))

    def __len__(self) -> int:
        return len(self.values)

    def select(self, names: Sequence[str]) -> RewardTable:
        """The columns ``names``, in that order.

        Raises:
            InvalidArgumentError: A name that the table does not have.
        """
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise InvalidArgumentError(f"`names` must be among {list(self.names)}. Found {unknown}.")
        columns = [self.names.index(name) for name in names]
        return RewardTable(tuple(names), self.values[:, columns], self.mask[:, columns], self.lost[:, columns])

    def means(self) -> dict[str, float]:
        """Mean of each reward over the samples for which it is defined; NaN where there is none."""
        columns = ((name, self.values[self.mask[:, k], k]) for k, name in enumerate(self.names))
        return {name: float(column.mean()) if len(column) else math.nan for name, column in columns}

    def stds(self) -> dict[str, float]:
        """Population standard deviation of each reward over the samples for which it is defined; NaN without any."""
        columns = ((name, self.values[self.mask[:, k], k]) for k, name in enumerate(self.names))
        return {name: float(column.std(unbiased=False)) if len(column) else math.nan for name, column in columns}

    def counts(self) -> dict[str, int]:
        """For how many samples each reward is defined."""
        return dict(zip(self.names, self.mask.sum(dim=0).tolist(), strict=True))

    @property
    def errors(self) -> dict[str, int]:
        """For how many samples the score of each reward was lost."""
        return dict(zip(self.names, self.lost.sum(dim=0).tolist(), strict=True))

    @classmethod
    def concatenate(cls, tables: Sequence[RewardTable]) -> RewardTable:
        """The tables of several batches as one.

        Raises:
            InvalidArgumentError: No table, or tables of different rewards.
        """
        if not tables or any(table.names != tables[0].names for table in tables):
            raise InvalidArgumentError(
                f"`tables` must be tables of the same rewards. Found {[table.names for table in tables]}."
            )
        return cls(
            names=tables[0].names,
            values=torch.cat([table.values for table in tables]),
            mask=torch.cat([table.mask for table in tables]),
            lost=torch.cat([table.lost for table in tables]),
        )
