"""Rewards to advantages: each reward on its own, within the group of samples of one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, NonFiniteError

# A reward is often computed in float32 (resolution 6e-8): a relative spread below this is round-off, not signal.
RELATIVE_SPREAD = 1e-6


@dataclass(frozen=True)
class Advantages:
    """Advantages of B samples under K rewards.

    Attributes:
        values: ``[B, K]`` float32; exactly 0 where the reward is missing or its group shows no spread.
        mask: ``[B, K]`` bool, where the reward is defined.
        degenerate: ``[K]`` int64, groups with a defined reward but a single one or no spread: no signal.
        groups: ``[K]`` int64, groups with at least one defined reward.
    """

    values: Tensor
    mask: Tensor
    degenerate: Tensor
    groups: Tensor

    def index(self, idx: Tensor) -> Advantages:
        """Those of the samples ``idx``; the counts of groups stay those of all."""
        return replace(self, values=self.values[idx], mask=self.mask[idx])

    def counting_missing(self) -> Advantages:
        """The same with missing rewards as defined ones of advantage 0."""
        return replace(self, mask=torch.ones_like(self.mask))


def group_advantages(
    rewards: Tensor,
    mask: Tensor | None,
    groups: Tensor | Sequence[Hashable],
    *,
    std: Literal["global", "group"] = "global",
    eps: float = 1e-4,
) -> Advantages:
    r"""Advantage of every sample under every reward, relative to the other samples of its prompt.

    .. math:: A_{ik} = \frac{R_{ik} - \mu_k(\mathrm{group}\ i)}{s_k + \epsilon}

    Means and standard deviations are over the samples for which reward k is defined, by two passes in float64. The
    standard deviation is that of a population (divided by n): ``std="global"``, as DiffusionNFT, takes it over all
    samples of reward k about their common mean; ``std="group"`` over the sample's group, as GRPO.

    A group with one defined sample, or whose largest deviation from its mean is below 1e-6 of its largest absolute
    reward (round-off), has advantage exactly 0 and is counted in ``degenerate``.

    Args:
        rewards: R ``[B, K]``, any real dtype; NaN where a reward does not apply.
        mask: ``[B, K]`` bool, where a reward applies. None: where ``rewards`` is not NaN.
        groups: B prompt-group ids, a 1-D tensor of integers or a sequence of hashable values. Samples of a group need
            not be neighbours, and groups may have different sizes.
        std: ``"global"`` or ``"group"``.
        eps: Added to the standard deviation, in units of the reward.

    Raises:
        InvalidArgumentError: Shapes that do not fit, unknown ``std``, negative ``eps``.
        NonFiniteError: NaN or Inf where ``mask`` says that the reward applies.

    >>> a = group_advantages(torch.tensor([[0.0], [10.0], [1.0], [11.0]]), None, [0, 1, 0, 1], std="group", eps=0.0)
    >>> a.values.flatten().tolist(), a.degenerate.tolist()
    ([-1.0, -1.0, 1.0, 1.0], [0])
    """
    if rewards.dim() != 2:
        raise InvalidArgumentError(f"`rewards` must be [B, K]. Found shape {tuple(rewards.shape)}.")
    values = rewards.detach().to(device="cpu", dtype=torch.float64)
    mask = ~values.isnan() if mask is None else mask.detach().to(device="cpu", dtype=torch.bool)
    if mask.shape != values.shape:
        raise InvalidArgumentError(
            f"`mask` must have the shape of `rewards`. Found {tuple(mask.shape)} and {tuple(values.shape)}."
        )
    if std not in ("global", "group"):
        raise InvalidArgumentError(f"`std` must be 'global' or 'group'. Found {std!r}.")
    if not eps >= 0:
        raise InvalidArgumentError(f"`eps` must not be negative. Found {eps}.")
    bad = mask & ~values.isfinite()
    if bool(bad.any()):
        i, k = bad.nonzero()[0].tolist()
        raise NonFiniteError(
            f"`rewards` must be finite where `mask` is True. Found {values[i, k]} for sample {i}, reward {k}. "
            "Mask the sample, or repair the reward."
        )
    index = _group_index(groups, len(values))
    number = int(index.max()) + 1 if len(index) else 0
    values = torch.where(mask, values, 0.0)
    per_group = _Sums(index, number, mask)

    deviation = torch.where(mask, values - per_group.mean(values)[index], 0.0)
    largest_deviation = per_group.largest(deviation.abs())
    spread = (per_group.count > 1) & (largest_deviation > RELATIVE_SPREAD * per_group.largest(values.abs()))
    if std == "group":
        scale = per_group.mean(deviation.square()).sqrt()[index]
    else:
        everything = _Sums(torch.zeros_like(index), 1, mask)
        overall = torch.where(mask, values - everything.mean(values), 0.0)
        scale = everything.mean(overall.square()).sqrt().expand_as(values)
    signal = mask & spread[index]
    advantages = torch.where(signal, deviation / torch.where(signal, scale + eps, 1.0), 0.0)
    return Advantages(
        values=advantages.to(device=rewards.device, dtype=torch.float32),
        mask=mask.to(rewards.device),
        degenerate=((per_group.count > 0) & ~spread).sum(dim=0),
        groups=(per_group.count > 0).sum(dim=0),
    )


class _Sums:
    """Masked counts, means and maxima ``[G, K]`` over G groups of rows."""

    def __init__(self, index: Tensor, number: int, mask: Tensor) -> None:
        self.index, self.number, self.mask = index, number, mask
        self.count = self._sum(mask.to(torch.float64))

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the masked rows of each group; 0 for a group without any. ``values`` is 0 outside the mask."""
        return self._sum(values) / self.count.clamp(min=1)

    def largest(self, values: Tensor) -> Tensor:
        """Largest of non-negative ``values`` in each group; 0 for a group without any."""
        index = self.index.unsqueeze(1).expand_as(values)
        return values.new_zeros(self.number, values.shape[1]).scatter_reduce(0, index, values, "amax")

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.number, values.shape[1]).index_add(0, self.index, values)


def _group_index(groups: Tensor | Sequence[Hashable], samples: int) -> Tensor:
    """Ids to 0, 1, 2 ... in order of first appearance, ``[B]`` int64 on the CPU."""
    ids: list[Hashable] = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(ids) != samples:
        raise InvalidArgumentError(f"`groups` must hold one id per sample. Found {len(ids)} ids for {samples} samples.")
    order = {group: i for i, group in enumerate(dict.fromkeys(ids))}
    return torch.tensor([order[group] for group in ids], dtype=torch.int64)
