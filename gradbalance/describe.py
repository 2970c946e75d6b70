"""Making a BalanceInfo from the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradbalance.gradients.collect import Choice
from gradbalance.gramian import direction_cosines, norms
from gradbalance.info import BalanceInfo
from gradbalance.solve import BalancerLike, coefficients_of


def describe(
    names: Sequence[str],
    weights: Tensor,
    loss_values: Tensor,
    active: Tensor,
    balancer: BalancerLike,
    gram: Tensor | None = None,
    choice: Choice | None = None,
    *,
    overflow: bool = False,
    skipped: tuple[str, ...] = (),
) -> BalanceInfo:
    """The info of a step: norms and cosines follow from the Gramian, None where no rows were collected.

    Args:
        names: K objectives.
        weights: [K] as applied to the raw rows.
        loss_values: [K] losses.
        active: bool [K].
        balancer: Asked for its coefficients.
        gram: [K, K] of the rows.
        choice: Which collector ran.
        overflow: See :class:`~gradbalance.BalanceInfo`.
        skipped: See :class:`~gradbalance.BalanceInfo`.
    """
    return BalanceInfo(
        names=tuple(names),
        weights=weights,
        loss_values=loss_values,
        active=active,
        refreshed=gram is not None,
        collector=None if choice is None else choice.collector,
        collector_reason="" if choice is None else choice.reason,
        coefficients=coefficients_of(balancer),
        gram=gram,
        norms=None if gram is None else norms(gram),
        cosines=None if gram is None else direction_cosines(gram, weights),
        overflow=overflow,
        skipped=skipped,
    )
