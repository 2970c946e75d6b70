r"""The DiffusionNFT loss as pure functions of predictions (Zheng et al., arXiv 2509.16117, section 3).

Notation: clean latents :math:`x_0`, noise :math:`e`, noise level :math:`\sigma \in (0, 1]`,
:math:`x_\sigma = (1-\sigma) x_0 + \sigma e`, network output :math:`v` with target :math:`e - x_0`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


def interpolate_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    r"""Noisy latents :math:`x_\sigma = (1-\sigma) x_0 + \sigma e`.

    Args:
        x0: Clean latents ``[B, ...]``.
        noise: Standard normal noise of the same shape.
        sigma: Noise levels ``[B]``.

    >>> interpolate_noise(torch.tensor([[4.0]]), torch.tensor([[0.0]]), torch.tensor([0.25]))
    tensor([[3.]])
    """
    _check_batch(x0, noise, sigma)
    s = _per_sample(sigma, x0)
    return (1 - s) * x0 + s * noise


def nft_terms(
    x0: Tensor,
    noise: Tensor,
    sigma: Tensor,
    velocity: Tensor,
    velocity_old: Tensor,
    *,
    guidance_beta: float,
    advantage_clip: float = 5.0,
    weight_floor: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    r"""The two per-sample terms :math:`L^+_i, L^-_i` that every reward's loss is made of.

    With :math:`\beta` = ``guidance_beta`` and :math:`C` = ``advantage_clip``, :math:`\phi` = ``weight_floor``,

    .. math::
        v^+ &= (1-\beta) v_{old} + \beta v, \qquad v^- = (1+\beta) v_{old} - \beta v \\
        d^\pm &= x_\sigma - \sigma v^\pm - x_0 = \sigma (e - x_0 - v^\pm) \\
        L^\pm_i &= \frac{C}{\beta} \cdot \frac{\mathrm{mean}\,(d^\pm_i)^2}{w^\pm_i}, \qquad
        w^\pm_i = \max(\mathrm{mean}\,|d^\pm_i|,\ \phi) \text{ without gradient, in float64}

    The loss of a reward with optimality :math:`r_i` is the mean of :math:`r_i L^+_i + (1-r_i) L^-_i`: affine in
    :math:`r`, and the terms do not depend on any reward. At :math:`v = v_{old}` the two terms are equal, so the *value*
    of the loss does not depend on :math:`r` while its gradient is proportional to :math:`2r - 1`.

    Args:
        x0: Clean latents ``[B, ...]``, float32.
        noise: The noise of the same shape that was mixed in.
        sigma: Noise levels ``[B]``.
        velocity: Prediction of the trained policy, with its graph.
        velocity_old: Prediction of the sampling policy; no gradient flows into it.
        guidance_beta: :math:`\beta > 0`, strength of the implicit guidance (not the KL weight).
        advantage_clip: :math:`C > 0`, advantages beyond it count as it.
        weight_floor: Lower bound of the adaptive weight.

    Returns:
        ``(L_plus, L_minus)``, each ``[B]`` in the dtype of ``velocity``.

    Raises:
        InvalidArgumentError: Shapes differ, or a constant is not positive.

    >>> x0, e, s, v = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.5]), torch.full((1, 2), 0.5)
    >>> nft_terms(x0, e, s, v, v, guidance_beta=0.1, advantage_clip=5.0)
    (tensor([12.5000]), tensor([12.5000]))
    """
    _check_batch(x0, noise, sigma, velocity, velocity_old)
    for name, value in (
        ("guidance_beta", guidance_beta),
        ("advantage_clip", advantage_clip),
        ("weight_floor", weight_floor),
    ):
        if not value > 0:
            raise InvalidArgumentError(f"`{name}` must be positive. Found {value}.")
    target = noise - x0
    old = velocity_old.detach()
    positive = (1 - guidance_beta) * old + guidance_beta * velocity
    negative = (1 + guidance_beta) * old - guidance_beta * velocity
    scale = advantage_clip / guidance_beta
    plus, minus = (
        scale * _weighted_square(_per_sample(sigma, x0) * (target - branch), weight_floor)
        for branch in (positive, negative)
    )
    return plus, minus


def optimality(advantages: Tensor, advantage_clip: float) -> Tensor:
    r"""Optimality :math:`r = \mathrm{clamp}(\tfrac12 + A / (2C), 0, 1)`, the probability that a sample is a good one.

    Args:
        advantages: Advantages A of any shape.
        advantage_clip: C > 0.

    >>> optimality(torch.tensor([-9.0, 0.0, 2.5]), 5.0)
    tensor([0.0000, 0.5000, 0.7500])
    """
    if not advantage_clip > 0:
        raise InvalidArgumentError(f"`advantage_clip` must be positive. Found {advantage_clip}.")
    return (0.5 + advantages / (2 * advantage_clip)).clamp(0, 1)


def kl_term(velocity: Tensor, velocity_reference: Tensor) -> Tensor:
    """Mean square difference ``[B]`` to the reference policy, which gets no gradient: the KL penalty up to a factor.

    Two Gaussian steps with equal covariance have a KL divergence proportional to the square of the difference of means.

    >>> kl_term(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([5.])
    """
    if velocity.shape != velocity_reference.shape:
        raise InvalidArgumentError(
            "`velocity` and `velocity_reference` must have the same shape. Found "
            f"{tuple(velocity.shape)} and {tuple(velocity_reference.shape)}."
        )
    return (velocity - velocity_reference.detach()).square().flatten(1).mean(dim=1)


def _weighted_square(difference: Tensor, floor: float) -> Tensor:
    flat = difference.flatten(1)
    weight = flat.detach().to(torch.float64).abs().mean(dim=1).clamp(min=floor).to(flat.dtype)
    return flat.square().mean(dim=1) / weight


def _per_sample(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def _check_batch(x0: Tensor, noise: Tensor, sigma: Tensor, *predictions: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (noise, *predictions)]
    if any(shape != tuple(x0.shape) for shape in shapes) or sigma.shape != (len(x0),) or x0.dim() < 2:
        raise InvalidArgumentError(
            "`x0`, `noise` and the velocities must have one shape [B, ...], and `sigma` the shape [B]. Found x0 "
            f"{tuple(x0.shape)}, noise and velocities {shapes}, sigma {tuple(sigma.shape)}."
        )
