"""Making a BalanceInfo from the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbalance.gradients.collect import Choice
from gradbalance.gramian import direction_cosines, joint_cosines, norms
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
    asked: bool = True,
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
        asked: Do the weights come from this Gramian, or were they cached in a cycle with rows?
        overflow: See :class:`~gradbalance.BalanceInfo`.
        skipped: See :class:`~gradbalance.BalanceInfo`.
    """
    return BalanceInfo(
        names=tuple(names),
        weights=weights,
        loss_values=loss_values,
        active=active,
        refreshed=gram is not None and asked,
        collector=None if choice is None else choice.collector,
        collector_reason="" if choice is None else choice.reason,
        coefficients=coefficients_of(balancer),
        gram=gram,
        norms=None if gram is None else norms(gram),
        cosines=None if gram is None else direction_cosines(gram, weights),
        overflow=overflow,
        skipped=skipped,
    )


def describe_groups(groups: Mapping[str, BalanceInfo]) -> BalanceInfo:
    """The info of a step with several balancers, from that of each: whole rows are the groups' side by side."""
    infos = list(groups.values())
    first = infos[0]
    grams = [info.gram for info in infos if info.gram is not None]
    weights = torch.stack([info.weights for info in infos])
    whole = sum(grams[1:], grams[0]) if grams else None
    return BalanceInfo(
        names=first.names,
        weights=weights,
        loss_values=first.loss_values,
        active=first.active,
        refreshed=any(info.refreshed for info in infos),
        collector=first.collector,
        collector_reason=first.collector_reason,
        gram=whole,
        norms=None if whole is None else norms(whole),
        cosines=None if whole is None else joint_cosines(grams, list(weights)),
        overflow=first.overflow,
        skipped=first.skipped,
        groups=groups,
    )
