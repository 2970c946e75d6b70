"""What one balancing step did, for logs and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True, eq=False)
class BalanceInfo:
    """Facts about one cycle, from losses to ``.grad``.

    Making one synchronizes no device: ``loss_values`` and ``active`` stay where they were computed, and ``losses`` and
    ``inactive`` fetch them when they are read.

    Attributes:
        names: K objectives.
        weights: [K] float64 on the CPU, as applied to the raw rows; with several balancers [G, K], a row for each
            group, in the order of ``groups``.
        loss_values: [K] sums of the losses over the micro-batches of the cycle; of several ranks, their mean.
        active: bool [K], objectives with any defined sample in the cycle, on any rank.
        refreshed: Were rows collected and the balancer (one of several) asked? Else the cached weights were used.
        collector: ``"passes"`` if any micro-batch was collected so, else ``"linear"``; None on steps without rows.
        collector_reason: Why that one.
        coefficients: [K] the balancer's simplex coefficients, where it has them; None with several balancers.
        gram: [K, K] float64 Gramian of the rows (without the loss scale of a scaler that was handed over); None on
            cached steps. A float32 row with a norm below 1e-32, or 1e-36 of the longest, counts as zero.
        norms: [K] row norms; None on cached steps.
        cosines: [K] cosines of the written direction with each row, 0 for a zero row; None on cached steps.
        overflow: A GradScaler's overflow: the balancer was not asked, and the non-finite mean of the rows was written
            for the scaler to see.
        skipped: Under ``on_nonfinite="skip"``, why the cycle was skipped: the objectives whose loss or row was not
            finite, and ``"extra_loss"``; all objectives where only the sum of gradients shows it (cached steps, task
            heads). Weights are then zero, and nothing else is known of the cycle. Empty otherwise.
        groups: With several balancers, the same facts for the parameters of each, by its name; here their Gramians
            are summed, so that ``gram``, ``norms`` and ``cosines`` are those of whole rows and the whole direction.
            In a cycle with rows a group has ``gram``, ``norms`` and ``cosines`` also where its own balancer was not
            asked (``refreshed`` is false then). Empty with a single balancer.
    """

    names: tuple[str, ...]
    weights: Tensor
    loss_values: Tensor
    active: Tensor
    refreshed: bool
    collector: str | None = None
    collector_reason: str = ""
    coefficients: Tensor | None = None
    gram: Tensor | None = None
    norms: Tensor | None = None
    cosines: Tensor | None = None
    overflow: bool = False
    skipped: tuple[str, ...] = ()
    groups: Mapping[str, BalanceInfo] = field(default_factory=dict)

    @cached_property
    def losses(self) -> dict[str, float]:
        """Each objective's loss, summed over the micro-batches of the cycle."""
        return dict(zip(self.names, self.loss_values.tolist(), strict=True))

    @cached_property
    def inactive(self) -> tuple[str, ...]:
        """Objectives without a defined sample in the cycle or, where rows are known, with a zero row."""
        alive = self.active.cpu()
        if self.norms is not None:
            alive = alive & (self.norms != 0)
        return tuple(name for name, is_alive in zip(self.names, alive.tolist(), strict=True) if not is_alive)
