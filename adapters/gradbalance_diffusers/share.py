"""Samples dealt out to ranks: which ones a rank makes and trains on, and what all ranks know of all samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradbalance as gb

from .rewards.table import RewardTable


@dataclass(frozen=True)
class Share:
    """S samples dealt out to W ranks like cards.

    Rank r has the samples at places r, r + W, r + 2 W, ... of ``order``. So any stretch of the order, such as the
    samples of one optimizer step, falls to the ranks in equal parts, give or take one sample.

    Args:
        order: A permutation of 0 ... S - 1, the same on every rank.
        ranks: That share.

    >>> share = Share(torch.tensor([2, 0, 1]), gb.distributed.Ranks("average"))  # one process
    >>> share.own
    tensor([0, 1, 2])
    """

    order: Tensor
    ranks: gb.distributed.Ranks

    @property
    def own(self) -> Tensor:
        """Samples of this rank, ascending."""
        return self._of(self.ranks.rank)

    def gather(self, own: Tensor, among: Tensor | None = None) -> Tensor:
        """Rows of samples 0 ... S - 1, the same on every rank, from the rows of each rank's own. Collective.

        Args:
            own: ``[b, ...]``, a row for each sample of :attr:`own`; b may be 0.
            among: Only rows of these samples are given, and returned in ascending order.

        >>> Share(torch.tensor([1, 0]), gb.distributed.Ranks("average")).gather(torch.tensor([[5.0], [6.0]]))
        tensor([[5.],
                [6.]])
        """
        gathered = gb.distributed.gather_samples(own, self.ranks.group)
        samples = torch.cat([self._of(rank) for rank in range(self.ranks.size)])
        if among is not None:
            samples = samples[torch.isin(samples, among)]
        return gathered[samples.argsort().to(gathered.device)]

    def gather_table(self, own: RewardTable | None, names: Sequence[str]) -> RewardTable:
        """Scores of all S samples, from the scores of each rank's own. Collective.

        Args:
            own: None on a rank without samples.
            names: The rewards.
        """
        packed = torch.empty(0, 3 * len(names), dtype=torch.float64)
        if own is not None:
            packed = torch.cat([own.values, own.mask.double(), own.lost.double()], dim=1)
        values, mask, lost = self.gather(packed).chunk(3, dim=1)
        return RewardTable(tuple(names), values, mask.bool(), lost.bool())

    def _of(self, rank: int) -> Tensor:
        return self.order[rank :: self.ranks.size].sort().values
