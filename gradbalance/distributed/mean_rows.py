"""Rows averaged over ranks, of which each rank keeps a part; their Gramian; and the one gradient that all ranks get."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from gradbalance.distributed.collectives import (
    BUCKET,
    flat_gradient,
    gather,
    reduce_scatter,
    scatters_natively,
    sum_,
    write,
)
from gradbalance.distributed.ranks import Ranks
from gradbalance.gradients.rows import Rows, parts
from gradbalance.gramian import gramian

# Into how many pieces rows of any size go at the most: each costs two collectives, which many ranks take long to start.
PIECES = 16


class MeanRows:
    """Rows averaged over W ranks, each rank holding a W-th of the columns.

    Of K rows of P numbers it takes a reduce-scatter of K P numbers, an all-reduce of the K x K partial Gramians and an
    all-gather of the P numbers of the one combined gradient: each rank sends ``(K + 1) P (W - 1) / W`` numbers, where
    all-reducing the rows takes ``2 K P (W - 1) / W``. Partial Gramians of disjoint columns add up to the Gramian,
    exactly but for rounding; their products are formed in float64, so rows whose norms differ by 1e+-30 keep every
    entry.

    Plain gradients that lie in ``.grad`` of the balanced parameters (of an extra loss) are averaged on the way as one
    row more, which takes no part in the Gramian and has weight 1.

    The columns go in pieces of BUCKET numbers, or in PIECES of them if those are larger: their copies are all the
    memory it takes beside the averaged rows, and each is large enough to be bound by bandwidth. Where the backend has
    no reduce-scatter of its own the rows are all-reduced in place instead; all else is the same.

    Args:
        rows: Of this rank; all-reduced in place or left alone.
        ranks: That average.
        plain: Is there a ``.grad`` on any balanced parameter of any rank?
        reached: Places of the parameters whose ``.grad`` is written: those that some rank reached, or with a ``.grad``.
        whole: All-reduce, so that :attr:`blocks` are whole rows on every rank.

    Attributes:
        blocks: This rank's columns of the averaged rows, [K, P_j] each; all columns if ``whole``.
    """

    def __init__(self, rows: Rows, ranks: Ranks, *, plain: bool, reached: Collection[int], whole: bool = False) -> None:
        self._ranks = ranks
        self._reached = reached
        self._parameters = rows.parameters
        self._groups = rows.groups
        self._members = rows.members
        self._empty = [block.new_empty(0) for block in rows.blocks]
        self._widths = [block.shape[1] for block in rows.blocks]
        self._pieces: list[_Piece] = []
        scatter = ranks.reduction == "reduce_scatter" and not whole
        for number, block in enumerate(rows.blocks):
            extra = self._plain(number) if plain else None
            if scatter or (ranks.reduction == "auto" and not whole and scatters_natively(ranks.group, block.device)):
                self._pieces += self._scattered(number, block, extra)
            else:
                self._pieces += self._reduced(number, block, extra)
        self.blocks = rows.blocks if whole else [piece.rows for piece in self._pieces]
        self._grams = self._products(len(rows.blocks[0]))

    def gramians(self) -> Tensor:
        """Gramian of the averaged rows of each group, [G, K, K] float64 on the CPU, the same on every rank."""
        return self._grams

    def _plain(self, number: int) -> Tensor:
        members = [self._parameters[j] for j in self._members[number]]
        return torch.cat([flat_gradient(parameter, self._empty[number].dtype) for parameter in members])

    def _scattered(self, number: int, block: Tensor, extra: Tensor | None) -> Iterator[_Piece]:
        world, count = self._ranks.size, len(block)
        height = count + (extra is not None)
        for columns in _slices(block.shape[1], height, world):
            part = -(-len(columns) // world)
            padding = part * world - len(columns)
            span = slice(columns.start, columns.stop)
            staged = block.new_empty(world, height, part)
            staged[:, :count] = _padded(block[:, span], padding).reshape(count, world, part).transpose(0, 1)
            if extra is not None:
                staged[:, count] = _padded(extra[span], padding).view(world, part)
            own = reduce_scatter(staged, self._ranks.group).div_(world)
            yield _Piece(number, columns, part, own[:count], own[count] if extra is not None else None)

    def _reduced(self, number: int, block: Tensor, extra: Tensor | None) -> Iterator[_Piece]:
        world, rank = self._ranks.size, self._ranks.rank
        sum_(block, self._ranks.group).div_(world)
        if extra is not None:
            sum_(extra, self._ranks.group).div_(world)
        for columns in _slices(block.shape[1], 1, world):
            part = -(-len(columns) // world)
            start = min(columns.start + rank * part, columns.stop)
            span = slice(start, min(start + part, columns.stop))
            yield _Piece(number, columns, part, block[:, span], None if extra is None else extra[span])

    def _products(self, count: int) -> Tensor:
        partial = torch.zeros(max(self._groups) + 1, count, count, dtype=torch.float64)
        for piece in self._pieces:
            partial[self._groups[piece.number]] += gramian(piece.rows)
        return sum_(partial.to(self._empty[0].device), self._ranks.group).cpu()

    def add_to_grad(self, *weights: Tensor) -> None:
        """Add ``sum_k weights_k * row_k`` to the averaged ``.grad``, with weights [K] for each group.

        Every rank combines its own columns, and all get the same numbers: what is written is bit for bit equal on all.
        """
        combined = [empty.new_empty(width) for empty, width in zip(self._empty, self._widths, strict=True)]
        for piece in self._pieces:
            own = piece.combined(weights[self._groups[piece.number]])
            whole = gather(own, self._ranks.group).view(-1)
            combined[piece.number][piece.columns.start : piece.columns.stop] = whole[: len(piece.columns)]
        for vector, indices in zip(combined, self._members, strict=True):
            for j, part in zip(indices, parts(vector, [self._parameters[j] for j in indices]), strict=True):
                if j in self._reached:
                    write(self._parameters[j], part)


class _Piece:
    """This rank's part of some columns of a block.

    Args:
        number: Of the block.
        columns: Which of its columns all ranks together hold.
        part: How many each rank holds; the last ones may hold fewer, or zeros.
        rows: [K, up to ``part``], averaged.
        plain: [up to ``part``], averaged.
    """

    def __init__(self, number: int, columns: range, part: int, rows: Tensor, plain: Tensor | None) -> None:
        self.number = number
        self.columns = columns
        self.part = part
        self.rows = rows
        self.plain = plain

    def combined(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k * row_k + plain``, [part]."""
        with torch.autocast(self.rows.device.type, enabled=False):
            vector = weights.to(self.rows) @ self.rows
        if self.plain is not None:
            vector += self.plain
        return _padded(vector, self.part - len(vector))


def _slices(width: int, height: int, world: int) -> Iterator[range]:
    """Columns in pieces over ``height`` rows, all but the last a multiple of ``world``."""
    numbers = max(BUCKET, height * width // PIECES)
    step = max(1, numbers // (height * world)) * world
    for start in range(0, width, step):
        yield range(start, min(start + step, width))


def _padded(tensor: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, columns)) if columns else tensor
