"""From one forward of the policy and TRL's own loss to one loss per reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import gradbalance as gb

from .private import SharedForward, quiet, shared_forward

if TYPE_CHECKING:
    from trl import GRPOTrainer


@dataclass(frozen=True, eq=False)
class RewardLosses:
    """The losses of one micro-batch, all on the graph of the same forward.

    Attributes:
        by_reward: K objectives with the gradients of ``L(A_k) - L(0)``.
        rest: A scalar with the gradient of ``L(0)``: KL penalty, entropy bonus and auxiliary losses, whatever TRL has.
        rest_is_zero: The rest has no gradient on this rank.
        value: TRL's loss at the mixed advantages, a number for the log.
    """

    by_reward: gb.AffineLoss
    rest: Tensor
    rest_is_zero: bool
    value: Tensor


def losses_by_reward(
    trainer: GRPOTrainer,
    loss: Callable[[Tensor], Tensor],
    advantages: Tensor,
    mixture: Tensor,
    names: Sequence[str],
    *,
    linear: bool,
    check: bool,
) -> RewardLosses:
    r"""Split TRL's loss into one loss per reward and a rest.

    TRL's loss reaches the model through its log-probabilities :math:`\ell_{it}` (and entropies), and depends on the
    advantages sample by sample: for every ``loss_type`` it is

    .. math:: L(A) = L(0) + \sum_i \big( A_i^+ P_i + A_i^- N_i \big), \qquad A^\pm = \max(\pm A, 0),

    because clipping, temperatures and off-policy masks look at the sign of an advantage only. So two calls of the loss,
    A = 1 and A = -1, on detached log-probabilities give the cotangents of all P_i and N_i, at no cost of the model, and
    the terms ``sum_t l[i, t] cotangent[i, t]`` have the gradients of P_i and N_i. Reward k has the coefficients A_ik^+
    and A_ik^-. On-policy N = -P and one call does: M = 1, and all K rows take one backward pass where the layers are
    recorded. The reference is K backward passes of ``L(A_k) - L(0)``.

    Args:
        trainer: Whose metrics get one entry, that of the mixture.
        loss: From advantages [B] to TRL's loss, calling the trainer's own code.
        advantages: A [B, K].
        mixture: [B], for the value and the metrics.
        names: K names.
        linear: N = -P holds.
        check: Compare the split with TRL's loss at the mixture.

    Raises:
        CollectorError: The check failed: this loss is not of the form above.
    """
    ones = torch.ones_like(mixture)
    with shared_forward(trainer) as forward:
        with quiet(trainer):
            none = _cotangents(loss(torch.zeros_like(mixture)), forward)
            positive = _cotangents(loss(ones), forward)[0] - none[0]
            negative = -positive if linear else _cotangents(loss(-ones), forward)[0] - none[0]
        # Last, so that what TRL keeps from one call to the next is that of the mixture.
        value = loss(mixture)
        if check:
            mix = _cotangents(value, forward)[0] - none[0]
            expected = mixture.clamp(min=0)[:, None] * positive + (-mixture).clamp(min=0)[:, None] * negative
            _check(mix, expected, torch.stack([positive, negative, none[0]]).abs().max())
    outputs = [output for output, _ in forward.differentiable]
    kinds = [positive] if linear else [positive, negative]
    terms = torch.stack([_contracted(outputs[0], cotangent) for cotangent in kinds])
    coefficients = [advantages] if linear else [advantages.clamp(min=0), (-advantages).clamp(min=0)]
    by_reward = gb.AffineLoss(terms, torch.stack(coefficients).permute(2, 0, 1), names)
    rest = torch.stack([_contracted(o, c).sum() for o, c in zip(outputs, none, strict=True)]).sum()
    return RewardLosses(by_reward, rest, not any(bool(c.any()) for c in none), value.detach())


def _cotangents(loss: Tensor, forward: SharedForward) -> list[Tensor]:
    leaves = [leaf for _, leaf in forward.differentiable]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if c is None else c for c, leaf in zip(found, leaves, strict=True)]


def _contracted(output: Tensor, cotangent: Tensor) -> Tensor:
    """``sum_t output[i, t] cotangent[i, t]`` in float32, shape [B]; a scalar output stays one."""
    product = output.float() * cotangent.float()
    return product.flatten(1).sum(1) if product.dim() > 1 else product


def _check(found: Tensor, expected: Tensor, size: Tensor) -> None:
    """Raise where cotangents differ by more than rounding, which is relative to the numbers that they were made of."""
    tolerance = 1e-3 if found.dtype in (torch.float32, torch.float64) else 5e-2
    error = (found - expected).float().abs().max() / (expected.float().abs().max() + 1e-2 * size.float())
    if error > tolerance:
        raise gb.CollectorError(
            "the loss of the trainer is not a sum over samples of terms proportional to their advantage (off by "
            f"{error:.1e} relative), so it cannot be split by reward: an override of the loss mixes samples or is not "
            "homogeneous in the advantages. Use a loss_type of TRL."
        )


def number(loss: Tensor) -> Tensor:
    """A leaf with the value of ``loss``: the Trainer's own backward pass on it touches nothing."""
    return loss.detach().clone().requires_grad_()


def with_value(surrogate: Tensor, value: Tensor) -> Tensor:
    """A scalar with the gradient of ``surrogate`` and another value."""
    return surrogate - surrogate.detach() + value
