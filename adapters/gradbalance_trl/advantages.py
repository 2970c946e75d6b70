"""One advantage per completion and reward, missing rewards left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, NonFiniteError

# Rewards come in float32 (resolution 6e-8): a relative spread below this is round-off, not signal.
_RELATIVE_SPREAD = 1e-6
_EPSILON = 1e-4


def advantages_per_reward(
    rewards: Tensor,
    num_generations: int,
    scale: Literal["group", "batch", "none"] = "group",
    names: Sequence[str] | None = None,
) -> Tensor:
    r"""GRPO's advantage, for each reward on its own.

    .. math:: A_{ik} = \frac{R_{ik} - \mu_{g(i)k}}{s_k + 10^{-4}}

    with the mean over the completions of sample i's group g(i) that have reward k. NaN (a reward function returned
    None) is left out of means and deviations and has advantage exactly 0: it moves nothing, unlike a reward of 0.

    A group in which a reward is defined once, or is the same everywhere to rounding, tells nothing about it: exactly 0.
    (Rounding divided by 1e-4 would be a gradient of noise, which a balancer that normalizes gradients makes as long as
    the others.)

    Args:
        rewards: R [N, K], N a multiple of ``num_generations``, groups one after the other, as TRL has them; NaN where a
            reward does not apply.
        num_generations: Completions per prompt.
        scale: What s_k is, as TRL's ``scale_rewards``: the unbiased standard deviation within the ``"group"`` or over
            the ``"batch"``; with ``"none"`` nothing is divided.
        names: K names, for errors.

    Returns:
        A [N, K], float32, on the device of ``rewards``.

    Raises:
        InvalidArgumentError: Shapes that do not fit, or an unknown ``scale``.
        NonFiniteError: A reward is infinite; names it.

    >>> advantages_per_reward(torch.tensor([[1.0, 5.0], [0.0, 5.0], [float("nan"), 5.0]]), 3, "none").tolist()
    [[0.5, 0.0], [-0.5, 0.0], [0.0, 0.0]]
    """
    if rewards.dim() != 2 or len(rewards) % num_generations:
        raise InvalidArgumentError(
            f"`rewards` should be [N, K] with N a multiple of num_generations = {num_generations}. Found shape "
            f"{list(rewards.shape)}."
        )
    if scale not in ("group", "batch", "none"):
        raise InvalidArgumentError(f"`scale` should be 'group', 'batch' or 'none'. Found {scale!r}.")
    infinite = rewards.isinf().any(0).tolist()
    if any(infinite):
        labels = names or [f"reward_{k}" for k in range(len(infinite))]
        bad = [label for label, is_bad in zip(labels, infinite, strict=True) if is_bad]
        raise NonFiniteError(
            f"rewards must be finite, or None where they do not apply, found Inf from {bad}; clip them in the reward "
            "function.",
            bad,
        )
    # On the CPU: some devices have no float64, and this is N x K numbers.
    grouped = rewards.detach().to("cpu", torch.float64).unflatten(0, (-1, num_generations))
    defined = ~grouped.isnan()
    count = defined.sum(1, keepdim=True)
    values = grouped.nan_to_num(nan=0.0)
    mean = values.sum(1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(defined, values - mean, 0.0)
    size = values.abs().amax(1, keepdim=True)
    silent = centered.abs().amax(1, keepdim=True) <= _RELATIVE_SPREAD * size
    advantages = torch.where(silent, 0.0, centered)
    if scale == "group":
        variance = centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + _EPSILON)
    elif scale == "batch":
        total = count.sum(0)
        overall = torch.where(defined, values - values.sum((0, 1)) / total.clamp(min=1), 0.0)
        variance = overall.square().sum((0, 1)) / (total - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + _EPSILON)
    return advantages.flatten(0, 1).to(rewards.device, torch.float32)


def mixed(advantages: Tensor, weights: Tensor) -> Tensor:
    """``sum_k weights_k A_ik``, shape [B]."""
    return (advantages * weights.to(advantages)).sum(1)
