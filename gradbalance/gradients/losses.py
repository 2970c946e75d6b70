"""One form for every way to hand over losses: K named differentiable scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradbalance.affine import AffineLoss
from gradbalance.errors import InvalidArgumentError, NonFiniteError

Losses: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor] | Tensor | AffineLoss


@dataclass(frozen=True, eq=False)
class Objectives:
    """K named losses of one micro-batch.

    Attributes:
        names: K distinct names.
        scalars: K differentiable scalars; empty for an AffineLoss, which makes them when asked.
        affine: The AffineLoss behind them, if there is one.
        active: bool [K]: the objective has any defined sample in this micro-batch.
        values: [K], detached, at least float32, on the device of the losses.
    """

    names: tuple[str, ...]
    scalars: tuple[Tensor, ...]
    affine: AffineLoss | None
    active: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.names)

    @property
    def roots(self) -> tuple[Tensor, ...]:
        """Tensors whose graphs together are the graph of the losses."""
        return self.scalars if self.affine is None else (self.affine.terms,)

    def scalar(self, index: int) -> Tensor:
        """Loss ``index``, a scalar whose backward pass sends nothing, not even zeros, to other losses."""
        return self.scalars[index] if self.affine is None else self.affine.objective(index)

    def total(self) -> Tensor:
        """The plain sum of losses as one differentiable scalar."""
        return self.scalarize(torch.ones(len(self)))

    def scalarize(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k * loss_k`` as one differentiable scalar."""
        if self.affine is not None:
            return self.affine.scalarize(weights)
        weights = weights.to(self.values)
        return torch.stack([_widened(loss, self.values) for loss in self.scalars]).mul(weights).sum()

    def aligned(self, names: tuple[str, ...]) -> Objectives:
        """The same objectives in the order of ``names``; an error that shows both where they differ.

        Raises:
            InvalidArgumentError: The names are not the same set.
        """
        if names == self.names:
            return self
        if sorted(names) != sorted(self.names):
            raise InvalidArgumentError(
                f"losses must keep the objectives they started with, {list(names)}, found {list(self.names)}; hand "
                "over every objective each time (AffineLoss masks those without samples), or make a new optimizer for "
                "a new set."
            )
        order = [self.names.index(name) for name in names]
        return Objectives(
            names,
            tuple(self.scalars[k] for k in order) if self.affine is None else (),
            None if self.affine is None else self.affine.reordered(order),
            self.active[order],
            self.values[order],
        )

    def non_finite(self, extra_loss: Tensor | None = None) -> tuple[str, ...]:
        """Names of the losses that are NaN or Inf, ``"extra_loss"`` among them. One host transfer each."""
        found = list(zip(self.names, self.values.tolist(), strict=True))
        if extra_loss is not None:
            found.append(("extra_loss", extra_loss.item()))
        return tuple(name for name, value in found if not math.isfinite(value))

    def require_finite(self, extra_loss: Tensor | None = None) -> None:
        """Raise where a loss, or the extra one, is NaN or Inf. One host transfer each.

        Raises:
            NonFiniteError: Names the objectives.
        """
        bad = list(self.non_finite(extra_loss))
        if bad:
            found = dict(zip(self.names, self.values.tolist(), strict=True))
            raise NonFiniteError(
                f"losses must be finite, found {found}: {bad} are not. Nothing was written to .grad and the balancer "
                "was not called.",
                bad,
            )


def as_objectives(losses: Losses) -> Objectives:
    """Check losses and bring them into one form.

    Args:
        losses: A dict from names to scalar tensors, a sequence of scalar tensors, a tensor of shape [K], or an
            AffineLoss. A sequence or tensor gets the names ``objective_0`` ...

    Raises:
        InvalidArgumentError: No losses, not scalar, not differentiable, names that are not strings.
    """
    if isinstance(losses, AffineLoss):
        if not losses.terms.requires_grad:
            raise InvalidArgumentError(
                "the terms of the AffineLoss need no grad: they were computed under no_grad, from detached tensors, "
                "or from frozen parameters. Compute them from the trained parameters with grad enabled."
            )
        return Objectives(losses.names, (), losses, losses.active, losses.objectives().detach())
    if isinstance(losses, Mapping):
        names, scalars = tuple(losses), tuple(losses.values())
    elif isinstance(losses, Tensor):
        if losses.dim() != 1:
            raise InvalidArgumentError(
                f"losses given as one tensor must have shape [K], found {list(losses.shape)}; a single loss goes in as "
                "{'name': loss} or loss[None], per-sample losses as an AffineLoss."
            )
        scalars = losses.unbind()
        names = tuple(f"objective_{k}" for k in range(len(scalars)))
    elif isinstance(losses, Sequence):
        scalars = tuple(losses)
        names = tuple(f"objective_{k}" for k in range(len(scalars)))
    else:
        raise InvalidArgumentError(
            f"losses must be a dict, a sequence, a tensor of shape [K] or an AffineLoss, found {type(losses).__name__}."
        )
    if not scalars:
        raise InvalidArgumentError("losses must hold at least one objective, found none.")
    for name, loss in zip(names, scalars, strict=True):
        _check_scalar(name, loss)
    values = torch.stack([_widened(loss.detach(), scalars[0]) for loss in scalars])
    return Objectives(names, scalars, None, torch.ones(len(scalars), dtype=torch.bool), values)


def check_extra_loss(extra_loss: Tensor | None) -> None:
    """Raise where an extra loss is not one differentiable number.

    Raises:
        InvalidArgumentError: Not a floating scalar tensor that requires grad.
    """
    if extra_loss is not None:
        _check_scalar("extra_loss", extra_loss)


def plus(loss: Tensor, extra_loss: Tensor | None) -> Tensor:
    """The sum of two scalars, on the device of the first; the first alone where there is no second."""
    return loss if extra_loss is None else loss + extra_loss.reshape(()).to(loss.device)


def _check_scalar(name: object, loss: object) -> None:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"names of losses must be strings, found {name!r}.")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidArgumentError(
            f"each loss must be a floating scalar tensor, found {found} for {name!r}; reduce it with .mean() or .sum()."
        )
    if not loss.requires_grad:
        raise InvalidArgumentError(
            f"loss {name!r} needs no grad: it was computed under no_grad, from detached tensors, or from frozen "
            "parameters. If an objective has no sample in this batch, return 0.0 * output.sum() for it."
        )


def _widened(loss: Tensor, like: Tensor) -> Tensor:
    """A 0-dimensional loss on the device of ``like``, in at least float32."""
    dtype = torch.promote_types(torch.promote_types(loss.dtype, like.dtype), torch.float32)
    return loss.reshape(()).to(like.device, dtype)
