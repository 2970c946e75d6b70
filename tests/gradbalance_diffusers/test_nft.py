from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.nft import interpolate_noise, kl_term, nft_terms, optimality


def problem(seed: int, batch: int = 3, dtype: torch.dtype = torch.float64, scale: float = 0.3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x0, noise, old, change = (torch.randn(batch, 2, 3, 2, generator=g, dtype=dtype) for _ in range(4))
    sigma = torch.rand(batch, generator=g, dtype=dtype) * 0.98 + 0.02
    return {"x0": x0, "noise": noise, "sigma": sigma, "velocity": old + scale * change, "velocity_old": old}


def literal_terms(p: dict[str, Tensor], beta: float, clip: float, floor: float) -> tuple[list[float], list[float]]:
    """Sample by sample and number by number, from the noisy latents, in plain Python floats."""
    plus, minus = [], []
    for i, sigma in enumerate(p["sigma"].tolist()):
        flat = {name: p[name][i].flatten().tolist() for name in ("x0", "noise", "velocity", "velocity_old")}
        for branch, out in ((1.0, plus), (-1.0, minus)):
            differences = []
            for x0, noise, v, v_old in zip(*flat.values(), strict=True):
                noisy = (1 - sigma) * x0 + sigma * noise
                mixed = (1 - branch * beta) * v_old + branch * beta * v
                differences.append(noisy - sigma * mixed - x0)
            weight = max(math.fsum(abs(d) for d in differences) / len(differences), floor)
            out.append(clip / beta * math.fsum(d * d for d in differences) / len(differences) / weight)
    return plus, minus


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    beta=st.floats(0.01, 2.0),
    clip=st.floats(0.5, 10.0),
    floor=st.sampled_from([1e-5, 0.5, 5.0]),
)
def test_terms_are_the_literal_formula(seed: int, beta: float, clip: float, floor: float) -> None:
    p = problem(seed)
    found = nft_terms(**p, guidance_beta=beta, advantage_clip=clip, weight_floor=floor)
    for term, expected in zip(found, literal_terms(p, beta, clip, floor), strict=True):
        assert term.tolist() == pytest.approx(expected, rel=1e-9)


def test_float32_is_close_to_float64() -> None:
    p = problem(1)
    single = {name: tensor.float() for name, tensor in p.items()}
    exact = nft_terms(**{k: v.double() for k, v in single.items()}, guidance_beta=0.1)
    for term, expected in zip(nft_terms(**single, guidance_beta=0.1), exact, strict=True):
        assert term.dtype == torch.float32
        torch.testing.assert_close(term.double(), expected, rtol=1e-5, atol=0)


def test_noisy_latents() -> None:
    p = problem(2)
    noisy = interpolate_noise(p["x0"], p["noise"], p["sigma"])
    for i, s in enumerate(p["sigma"].tolist()):
        torch.testing.assert_close(noisy[i], (1 - s) * p["x0"][i] + s * p["noise"][i])


def gradient(p: dict[str, Tensor], r: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    v = p["velocity"].clone().requires_grad_()
    plus, minus = nft_terms(**{**p, "velocity": v}, guidance_beta=beta)
    losses = r * plus + (1 - r) * minus
    return losses.detach(), torch.autograd.grad(losses.sum(), v)[0]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), r=st.floats(0.0, 1.0), beta=st.floats(0.05, 1.0))
def test_at_the_old_policy_the_value_ignores_r_and_the_gradient_is_proportional(
    seed: int, r: float, beta: float
) -> None:
    p = problem(seed, scale=0.0)
    value, slope = gradient(p, torch.full((3,), r, dtype=torch.float64), beta)
    best_value, best_slope = gradient(p, torch.ones(3, dtype=torch.float64), beta)
    torch.testing.assert_close(value, best_value)
    torch.testing.assert_close(slope, (2 * r - 1) * best_slope, rtol=1e-9, atol=1e-9)
    assert best_slope.abs().max() > 0


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), r=st.floats(0.0, 1.0), s=st.floats(0.0, 1.0), share=st.floats(0.0, 1.0))
def test_value_and_gradient_are_affine_in_r(seed: int, r: float, s: float, share: float) -> None:
    p = problem(seed)
    (value_r, slope_r), (value_s, slope_s), (value, slope) = (
        gradient(p, torch.full((3,), x, dtype=torch.float64)) for x in (r, s, share * r + (1 - share) * s)
    )
    torch.testing.assert_close(value, share * value_r + (1 - share) * value_s)
    torch.testing.assert_close(slope, share * slope_r + (1 - share) * slope_s, rtol=1e-7, atol=1e-9)


def test_the_adaptive_weight_has_no_gradient() -> None:
    """With one element the term is |d| and its slope -2; a weight that is differentiated too would make it -1."""
    x0 = torch.zeros(1, 1, dtype=torch.float64)
    v = torch.full((1, 1), 0.25, dtype=torch.float64, requires_grad=True)
    old = v.detach().clone()
    plus, _ = nft_terms(x0, x0 + 1, torch.ones(1, dtype=torch.float64), v, old, guidance_beta=1.0, advantage_clip=1.0)
    (slope,) = torch.autograd.grad(plus.sum(), v)
    difference = 1 - 0.25
    assert plus.item() == pytest.approx(difference)
    assert slope.item() == pytest.approx(-2 * difference / difference)


def test_no_gradient_into_the_old_policy() -> None:
    p = problem(3)
    old = p["velocity_old"].requires_grad_()
    v = p["velocity"].detach().requires_grad_()
    plus, minus = nft_terms(**{**p, "velocity": v, "velocity_old": old}, guidance_beta=0.1)
    (plus + minus).sum().backward()
    assert old.grad is None
    assert v.grad is not None


def test_half_optimality_pulls_back_to_the_old_policy() -> None:
    p = problem(4, scale=1.0)
    _, slope = gradient(p, torch.full((3,), 0.5, dtype=torch.float64))
    assert float((slope * (p["velocity"] - p["velocity_old"])).sum()) > 0


def test_perfect_prediction_is_finite() -> None:
    p = problem(5, scale=0.0)
    p["velocity"] = p["velocity_old"] = p["noise"] - p["x0"]
    _, slope = gradient(p, torch.ones(3, dtype=torch.float64))
    assert bool(slope.isfinite().all())


def test_optimality() -> None:
    a = torch.tensor([[-20.0, -5.0, -1.0], [0.0, 5.0, 100.0]])
    assert optimality(a, 5.0).tolist() == [[0.0, 0.0, pytest.approx(0.4)], [0.5, 1.0, 1.0]]


def test_kl_term() -> None:
    p = problem(6)
    v, ref = p["velocity"].requires_grad_(), p["velocity_old"].requires_grad_()
    found = kl_term(v, ref)
    expected = [((v[i] - ref[i]) ** 2).mean().item() for i in range(3)]
    assert found.tolist() == pytest.approx(expected)
    found.sum().backward()
    assert ref.grad is None
    torch.testing.assert_close(v.grad, 2 * (v - ref).detach() / v[0].numel())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_beta": 0.0}, "guidance_beta"),
        ({"advantage_clip": -1.0}, "advantage_clip"),
        ({"weight_floor": 0.0}, "weight_floor"),
        ({"sigma": torch.ones(2)}, "sigma"),
        ({"velocity": torch.zeros(3, 2, 3, 1)}, "velocities"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        nft_terms(**{**problem(0), "guidance_beta": 0.1, **changes})


def test_bad_arguments_of_the_small_functions() -> None:
    with pytest.raises(InvalidArgumentError, match="advantage_clip"):
        optimality(torch.zeros(2), 0.0)
    with pytest.raises(InvalidArgumentError, match="velocity_reference"):
        kl_term(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(InvalidArgumentError, match="sigma"):
        interpolate_noise(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))
