"""AffineLoss against slow, clear references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradbalance.affine import AffineLoss
from gradbalance.errors import InvalidArgumentError, NonFiniteError


def reference_nft(plus: Tensor, minus: Tensor, r: Tensor, mask: Tensor, counts: list[int]) -> list[Tensor]:
    """Each objective by a loop over its defined samples."""
    objectives = []
    for k in range(r.shape[1]):
        loss = 0.0 * plus.sum()
        for i in range(r.shape[0]):
            if mask[i, k]:
                loss = loss + (r[i, k] * plus[i] + (1 - r[i, k]) * minus[i]) / counts[k]
        objectives.append(loss)
    return objectives


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, int, torch.dtype]:
    return (
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from([torch.float32, torch.float64])),
    )


def make(seed: int, batch: int, objectives: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A parameter, two terms of it, r clamped at both ends for some samples, a mask with NaN behind it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    theta = normal(4).requires_grad_()
    plus, minus = (normal(batch, 4) @ theta).square(), (normal(batch, 4) @ theta).sin()
    r = (normal(batch, objectives) + 0.5).clamp(0, 1)
    mask = torch.rand(batch, objectives, generator=generator) < 0.6
    r[~mask] = math.nan
    return theta, plus, minus, r, mask


@given(problems(), st.sampled_from([False, True]), st.sampled_from([0, 3]))
def test_scalarize_is_the_weighted_sum_of_separate_gradients(
    problem: tuple[int, int, int, torch.dtype], center: bool, more_counts: int
) -> None:
    theta, plus, minus, r, mask = make(*problem)
    tolerance = 1e-6 if problem[3] == torch.float32 else 1e-12
    weights = torch.randn(problem[2], dtype=torch.float64) * 10
    counts = [int(n) + more_counts for n in mask.sum(0)]
    loss = AffineLoss.interpolate(plus, minus, r, mask, counts=counts, center=center)

    scalarized = loss.scalarize(weights)
    if center:
        # The shared part, once per objective and per defined share, is what centering takes out.
        shares = mask.to(theta.dtype) / torch.tensor([max(n, 1) for n in counts]).to(theta.dtype)
        scalarized = scalarized + ((shares @ weights.to(theta.dtype)) * (plus + minus) / 2).sum()
    (found,) = torch.autograd.grad(scalarized, theta, retain_graph=True)

    separate = reference_nft(plus, minus, torch.nan_to_num(r), mask, counts)
    gradients = [torch.autograd.grad(one, theta, retain_graph=True)[0] for one in separate]
    expected = sum(w * g.double() for w, g in zip(weights, gradients, strict=True))
    size = sum(abs(w) * g.double().norm() for w, g in zip(weights, gradients, strict=True))
    assert (found.double() - expected).norm() <= tolerance * (size + weights.abs().sum())


@given(problems())
def test_objectives_equal_the_loop(problem: tuple[int, int, int, torch.dtype]) -> None:
    _, plus, minus, r, mask = make(*problem)
    loss = AffineLoss.interpolate(plus, minus, r, mask)
    expected = torch.stack(reference_nft(plus, minus, torch.nan_to_num(r), mask, mask.sum(0).tolist()))
    torch.testing.assert_close(loss.objectives(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.stack([loss.objective(k) for k in range(len(loss))]), expected, rtol=1e-5, atol=1e-5
    )
    assert loss.active.tolist() == mask.any(0).tolist()


@given(problems(), st.integers(1, 4), st.booleans())
def test_micro_batches_add_up_to_the_batch(
    problem: tuple[int, int, int, torch.dtype], parts: int, center: bool
) -> None:
    theta, plus, minus, r, mask = make(*problem)
    counts, size = mask.sum(0), len(plus)
    weights = torch.linspace(-1, 2, problem[2])
    whole = AffineLoss.interpolate(plus, minus, r, mask, center=center)
    pieces = [
        AffineLoss.interpolate(*piece, counts=counts, center=center, batch_size=size)
        for piece in zip(*(t.chunk(parts) for t in (plus, minus, r, mask)), strict=True)
    ]

    def gradient(losses: list[AffineLoss]) -> Tensor:
        total = sum(loss.scalarize(weights) + (loss.common if loss.common is not None else 0) for loss in losses)
        return torch.autograd.grad(total, theta, retain_graph=True)[0]

    torch.testing.assert_close(gradient(pieces), gradient([whole]), rtol=1e-5, atol=1e-5)


@given(problems())
def test_linear_equals_the_loop(problem: tuple[int, int, int, torch.dtype]) -> None:
    _, terms, _, advantages, mask = make(*problem)
    loss = AffineLoss.linear(terms, advantages, mask)
    expected = [
        sum((advantages[i, k] * terms[i] / mask[:, k].sum() for i in range(len(terms)) if mask[i, k]), torch.zeros(()))
        for k in range(problem[2])
    ]
    torch.testing.assert_close(loss.objectives(), torch.stack(expected).to(loss.objectives()), rtol=1e-5, atol=1e-5)


def test_centered_objectives_vanish_for_indifferent_rewards_but_stay_active() -> None:
    loss = AffineLoss.interpolate(torch.rand(3), torch.rand(3), torch.full((3, 2), 0.5), center=True)
    assert loss.objectives().tolist() == [0, 0]
    assert loss.active.all()


def test_fully_masked_objective_is_zero_and_inactive() -> None:
    terms = torch.rand(3, requires_grad=True)
    mask = torch.tensor([[True, False]] * 3)
    loss = AffineLoss.interpolate(terms, terms * 2, torch.full((3, 2), math.nan).masked_fill(mask, 0.3), mask)
    assert loss.objectives()[1].item() == 0
    assert loss.active.tolist() == [True, False]


def test_integer_and_bool_rewards_and_half_terms_are_widened() -> None:
    terms = torch.ones(2, dtype=torch.bfloat16)
    for r in (torch.tensor([[0], [1]]), torch.tensor([[False], [True]])):
        loss = AffineLoss.interpolate(terms, terms * 3, r)
        assert loss.objectives().dtype == torch.float32
        assert loss.objectives().tolist() == [2.0]


def test_objectives_ignore_autocast() -> None:
    terms = torch.tensor([[1.0009765625, 1.0]])
    loss = AffineLoss(terms, torch.ones(1, 1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert loss.objectives().item() == 2.0009765625
        assert loss.scalarize([1.0]).item() == 2.0009765625


def test_reordered() -> None:
    loss = AffineLoss.linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0, 3.0]] * 2), names=["a", "b", "c"])
    other = loss.reordered([2, 0, 1])
    assert other.names == ("c", "a", "b")
    assert other.objectives().tolist() == loss.objectives()[[2, 0, 1]].tolist()


B = torch.ones(3)
R = torch.full((3, 2), 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positive": torch.ones(3, 1)}, "shape .B."),
        ({"negative": torch.ones(2)}, "shape .B."),
        ({"r": torch.ones(3)}, r"r must be real and have shape \[B, K\] = \[3, K\]"),
        ({"r": torch.ones(2, 2)}, r"r must be real and have shape"),
        ({"r": torch.ones(3, 0)}, r"r must be real and have shape"),
        ({"r": R.clone().fill_(1.5)}, r"r must lie in \[0, 1\], found values from 1.5 to 1.5 .*objective_0"),
        ({"r": R - 1}, r"r must lie in \[0, 1\]"),
        ({"mask": torch.ones(3, 2)}, "mask must be a bool tensor of shape .3, 2."),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, "mask must be a bool tensor"),
        ({"counts": [3, 2]}, "counts are the defined samples of the whole cycle.*objective_1"),
        ({"counts": [3, math.nan]}, "counts are the defined samples"),
        ({"counts": [3]}, "counts must hold one number per objective"),
        ({"batch_size": 2}, "batch_size"),
        ({"names": ["a", "a"]}, "names must be distinct, found .'a'."),
        ({"names": ["a"]}, "names must be 2 strings"),
        ({"names": "ab"}, "names must be 2 strings"),
    ],
)
def test_bad_arguments_of_interpolate(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        AffineLoss.interpolate(**{"positive": B, "negative": B, "r": R} | arguments)


def test_nan_where_defined_names_the_objective() -> None:
    r = R.clone()
    r[1, 1] = math.nan
    with pytest.raises(NonFiniteError, match="ocr") as caught:
        AffineLoss.interpolate(B, B, r, names=["aesthetic", "ocr"])
    assert caught.value.objectives == ("ocr",)
    with pytest.raises(NonFiniteError, match="ocr"):
        AffineLoss.linear(B, r * math.inf, torch.tensor([[False, True]] * 3), names=["aesthetic", "ocr"])


@pytest.mark.parametrize(
    ("terms", "coefficients", "message"),
    [
        (torch.ones(3), torch.ones(1, 1, 3), "terms must be a floating tensor of shape .M, B."),
        (torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 1, 3), "terms must be a floating tensor"),
        (torch.ones(1, 3), torch.ones(1, 3), "coefficients must have shape"),
        (torch.ones(1, 3), torch.ones(0, 1, 3), "with K >= 1"),
        (torch.ones(1, 3), torch.ones(2, 2, 3), "coefficients must have shape"),
    ],
)
def test_bad_arguments_of_the_constructor(terms: Tensor, coefficients: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        AffineLoss(terms, coefficients)


def test_bad_coefficients_active_and_weights() -> None:
    with pytest.raises(NonFiniteError, match="objective_1"):
        AffineLoss(torch.ones(1, 2), torch.tensor([[[0.0, 1.0]], [[math.inf, 0.0]]]))
    with pytest.raises(InvalidArgumentError, match="active must be a bool"):
        AffineLoss(torch.ones(1, 2), torch.ones(1, 1, 2), active=torch.ones(2, dtype=torch.bool))
    with pytest.raises(InvalidArgumentError, match="weights must hold 1 numbers"):
        AffineLoss(torch.ones(1, 2), torch.ones(1, 1, 2)).scalarize([1.0, 2.0])
