"""From per-sample rewards, masks and counts to the constant coefficients of an affine loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, NonFiniteError


def interpolation_coefficients(
    r: Tensor,
    mask: Tensor | None,
    counts: Tensor | Sequence[float] | None,
    batch: int,
    dtype: torch.dtype,
    names: Sequence[str] | None,
) -> tuple[Tensor, Tensor]:
    """Coefficients of ``r L+ + (1 - r) L-`` averaged over defined samples.

    Returns:
        ``[K, 2, B]`` with ``m_ik r_ik / n_k`` and ``m_ik (1 - r_ik) / n_k``, and bool ``[K]``: any sample defined.
    """
    share, values, active = _masked("r", r, mask, counts, batch, dtype, names, unit_interval=True)
    return torch.stack([share * values, share * (1 - values)]).permute(2, 0, 1), active


def linear_coefficients(
    advantages: Tensor,
    mask: Tensor | None,
    counts: Tensor | Sequence[float] | None,
    batch: int,
    dtype: torch.dtype,
    names: Sequence[str] | None,
) -> tuple[Tensor, Tensor]:
    """Coefficients of ``A * term`` averaged over defined samples.

    Returns:
        ``[K, 1, B]`` with ``m_ik A_ik / n_k``, and bool ``[K]``: any sample defined.
    """
    share, values, active = _masked("advantages", advantages, mask, counts, batch, dtype, names, unit_interval=False)
    return (share * values).T[:, None], active


def _masked(
    what: str,
    values: Tensor,
    mask: Tensor | None,
    counts: Tensor | Sequence[float] | None,
    batch: int,
    dtype: torch.dtype,
    names: Sequence[str] | None,
    *,
    unit_interval: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check everything in one reduction.

    Returns:
        Shares ``m_ik / n_k`` [B, K], values with 0 where masked [B, K], and bool [K]: any sample defined.
    """
    if values.dim() != 2 or values.shape[0] != batch or values.shape[1] == 0 or values.is_complex():
        raise InvalidArgumentError(
            f"{what} must be real and have shape [B, K] = [{batch}, K], one row per sample and one column per "
            f"objective, found {values.dtype} of shape {list(values.shape)}."
        )
    values = values.detach().to(dtype)
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    elif mask.dtype != torch.bool or mask.shape != values.shape:
        raise InvalidArgumentError(
            f"mask must be a bool tensor of shape {list(values.shape)} like {what}, True where the objective is "
            f"defined, found {mask.dtype} of shape {list(mask.shape)}."
        )
    mask = mask.to(values.device)
    own = mask.sum(0).to(dtype)
    total = own if counts is None else torch.as_tensor(counts).detach().to(own)
    if total.shape != own.shape:
        raise InvalidArgumentError(
            f"counts must hold one number per objective ({own.shape[0]}), found shape {list(total.shape)}."
        )
    values = torch.where(mask, values, 0)
    infinite = ~torch.isfinite(values).all(0)
    outside = ((values < 0) | (values > 1)).any(0) if unit_interval else torch.zeros_like(infinite)
    problems = torch.stack([infinite, outside, ~(total >= own)])
    if problems.any():
        _raise_first_problem(what, problems.tolist(), values, own, total, names)
    # n_k = 0 happens only where every sample is masked: the share is 0 / 1.
    return mask.to(dtype) / total.clamp(min=1), values, mask.any(0)


def _raise_first_problem(
    what: str, problems: list[list[bool]], values: Tensor, own: Tensor, total: Tensor, names: Sequence[str] | None
) -> None:
    labels = list(names) if names is not None else [f"objective_{k}" for k in range(values.shape[1])]
    infinite, outside, short = ([label for label, bad in zip(labels, row, strict=False) if bad] for row in problems)
    if infinite:
        raise NonFiniteError(
            f"{what} is NaN or Inf where the mask is True, for objectives {infinite}; set the mask to False for those "
            f"samples.",
            infinite,
        )
    if outside:
        low, high = values.min().item(), values.max().item()
        raise InvalidArgumentError(
            f"{what} must lie in [0, 1], found values from {low} to {high} for objectives {outside}; clamp it, for "
            "example r = (advantage / (2 * limit) + 0.5).clamp(0, 1)."
        )
    raise InvalidArgumentError(
        "counts are the defined samples of the whole cycle and cannot be below this batch's own, found "
        f"{total.tolist()} against {own.tolist()} for objectives {short}; sum the masks over all micro-batches and "
        "ranks."
    )
