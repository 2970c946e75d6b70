"""The one small exchange at the end of every cycle: what the ranks lost, saw and wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradbalance.distributed.collectives import carrier, sum_
from gradbalance.distributed.ranks import Ranks
from gradbalance.errors import RanksError

# Squares of such numbers add up exactly in float64 over 2^12 ranks.
_BITS = 20


class Meeting:
    """Facts of all ranks about one cycle, from a single all-reduce of 2 K + N + 4 float64 numbers.

    It is not waited for on an accelerator: losses and activity stay there, and the rest crosses to the host when it is
    asked for.

    Args:
        losses: [K] of this rank.
        extra: Scalar, the extra loss of this rank, or zero.
        active: bool [K].
        present: For each of N parameters, does this rank have a gradient for it? N is the same on every rank.
        plain: Lies a plain gradient on any balanced parameter?
        facts: What must be equal on all ranks in this cycle for the collectives that follow.
        ranks: That meet.

    Attributes:
        losses: [K], the mean over ranks.
        active: bool [K], on any rank.
    """

    def __init__(
        self,
        losses: Tensor,
        extra: Tensor,
        active: Tensor,
        present: Sequence[bool],
        plain: bool,
        facts: object,
        ranks: Ranks,
    ) -> None:
        device = carrier(ranks.group, losses.device)
        digest = int(hashlib.sha256(repr(facts).encode()).hexdigest(), 16) % (1 << _BITS)
        flags = torch.tensor([digest, digest**2, plain, *present], dtype=torch.float64)
        parts = [losses.detach(), extra.detach().reshape(1), active, flags]
        joined = torch.cat([part.to(device, torch.float64) for part in parts])
        self._world = ranks.size
        self._count = len(losses)
        self._sums = sum_(joined, ranks.group)
        self.losses = (self._sums[: self._count] / self._world).to(losses)
        self.active = self._sums[self._count + 1 : 2 * self._count + 1] > 0

    @cached_property
    def _host(self) -> list[float]:
        sums: list[float] = self._sums.tolist()
        return sums

    @property
    def bad(self) -> tuple[int, ...]:
        """Objectives whose loss is NaN or Inf on some rank; K stands for the extra loss."""
        return tuple(k for k, value in enumerate(self._host[: self._count + 1]) if not abs(value) < float("inf"))

    @property
    def plain(self) -> bool:
        """Has any rank a plain gradient on a balanced parameter?"""
        return self._host[2 * self._count + 3] > 0

    @property
    def present(self) -> list[bool]:
        """For each of the N parameters: has any rank a gradient for it?"""
        return [value > 0 for value in self._host[2 * self._count + 4 :]]

    def require_in_step(self) -> None:
        """Raise where the ranks are about to do different things.

        Raises:
            RanksError: On every rank that looks.
        """
        total, squares = self._host[2 * self._count + 1 : 2 * self._count + 3]
        # Equality in the Cauchy-Schwarz inequality: all numbers are the same. Every rank comes to the same answer.
        if self._world * squares != total**2:
            raise RanksError(
                "ranks are out of step: in this cycle they do not agree on the objectives, on whether rows are due, or "
                "on the parameters outside the optimizer that the losses reach. Call backward, step and zero_grad "
                "equally often on every rank, and load the same checkpoint on all."
            )
