"""Rows of which every rank holds its own shard from the start: parameters under FSDP2."""

from __future__ import annotations

from torch import Tensor

from gradbalance.distributed.collectives import carrier, sum_
from gradbalance.distributed.ranks import Ranks
from gradbalance.gradients.rows import Rows


class ShardedRows:
    """Averaged rows in shards: FSDP reduced them in the backward passes, and only Gramians are left to add up.

    Shards are disjoint parts of the columns, so the partial Gramians add up to the Gramian exactly but for rounding in
    float64. The combination stays a shard: nothing is gathered.

    Args:
        rows: This rank's shard of the averaged rows.
        ranks: That hold the others.

    Attributes:
        blocks: This rank's columns.
    """

    def __init__(self, rows: Rows, ranks: Ranks) -> None:
        self._rows = rows
        self._grams = sum_(rows.gramians().to(carrier(ranks.group, rows.blocks[0].device)), ranks.group).cpu()
        self.blocks = rows.blocks

    def gramians(self) -> Tensor:
        """Gramian of the whole rows of each group, [G, K, K] float64 on the CPU, the same on every rank."""
        return self._grams

    def add_to_grad(self, *weights: Tensor) -> None:
        """Add ``sum_k weights_k * row_k`` to the shards of ``.grad``."""
        self._rows.add_to_grad(*weights)
