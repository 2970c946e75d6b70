"""For every invariant, a balancer that is broken in just that respect must be caught, and a good one must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradbalance as gb
import gradbalance.testing as kit
from gradbalance.testing import ClaimError, Invariant, check_balancer


class Wrapped:
    """A good balancer whose answers go through a change."""

    def __init__(self, inner: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.inner = inner
        self.change = change

    def __call__(self, gram: Tensor) -> Tensor:
        return self.change(self.inner(gram), gram)


def changed(make: Callable[[], Any], change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Wrapped]:
    return lambda: Wrapped(make(), change)


class WrongCoefficients(gb.MGDA):
    def __call__(self, gram: Tensor, /) -> Tensor:
        weights = super().__call__(gram)
        self.coefficients = 2 * weights
        return weights


class ForgetsTheAge(gb.MARBLE):
    def __init__(self) -> None:
        super().__init__(interval=3)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "age": 0})


class TensorState(gb.MARBLE):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "extra": torch.ones(1)}


class NeedsRowsNever(gb.MARBLE):
    needs_rows = False  # type: ignore[assignment]


class NoCache(gb.MARBLE):
    @property
    def weights(self) -> Tensor:
        return super().weights * torch.nan


class SwallowsNonFinite(gb.MARBLE):
    def __call__(self, gram: Tensor, /) -> Tensor:
        return super().__call__(gram.nan_to_num())


class RemembersNonFinite(gb.MARBLE):
    poisoned = False

    def __call__(self, gram: Tensor, /) -> Tensor:
        self.poisoned |= not bool(torch.isfinite(gram).all())
        weights = super().__call__(gram)
        return torch.flip(weights, [0]) if self.poisoned else weights


class SaysOtherConstant(gb.Mean):
    def weights_for(self, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.float64)

    def __call__(self, gram: Tensor, /) -> Tensor:
        return torch.ones(len(gram), dtype=torch.float64) / len(gram)


class Alternates:
    """One balancer in two answers differently: a counter shared by all of them."""

    made = 0

    def __init__(self) -> None:
        Alternates.made += 1
        self.odd = Alternates.made % 2

    def __call__(self, gram: Tensor) -> Tensor:
        return torch.ones(len(gram), dtype=torch.float64) * (1 + 1e-15 * self.odd)


class Remembers:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gram: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(gram),), 1.0 / self.calls)


def writes(weights: Tensor, gram: Tensor) -> Tensor:
    gram.diagonal().add_(1e-4)
    return weights


def absolute_threshold(weights: Tensor, gram: Tensor) -> Tensor:
    """As peers do: below an absolute size, the mean."""
    return torch.full_like(weights, 1 / len(weights)) if gram.trace() < 1e-4 else weights


def nearly(weights: Tensor, gram: Tensor) -> Tensor:
    """A little towards the mean."""
    return 0.99 * weights + 0.01 / len(weights)


def first_of_ties(weights: Tensor, gram: Tensor) -> Tensor:
    """All weight of rows equal to the first goes to the first."""
    same = torch.isclose(gram[0], gram[0, 0]) & torch.isclose(gram.diagonal(), gram[0, 0])
    given = weights.clone()
    given[same] = 0.0
    given[0] = weights[same].sum()
    return given


unit_mgda = lambda: gb.MGDA(normalize=True)  # noqa: E731

BROKEN: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    # name: (good, broken)
    "finite_output": (gb.MGDA, changed(gb.MGDA, lambda w, g: w / (w[0] > 0))),
    "non_negative_weights": (gb.MGDA, changed(gb.MGDA, lambda w, g: w - 1e-9)),
    "simplex": (gb.MGDA, changed(gb.MGDA, lambda w, g: w * (1 + 1e-5))),
    "simplex_coefficients": (unit_mgda, WrongCoefficients),
    "zero_rows_get_zero_weight": (unit_mgda, gb.Mean),
    "non_conflict": (gb.MGDA, changed(gb.MGDA, nearly)),
    "min_norm_optimality": (gb.MGDA, changed(gb.MGDA, nearly)),
    "unit_min_norm_optimality": (unit_mgda, gb.MGDA),
    "equal_gain": (gb.NashMTL, changed(gb.NashMTL, lambda w, g: w * 1.001)),
    "rests_when_stationary": (gb.MGDA, changed(gb.MGDA, nearly)),
    "scale_equivariance": (gb.MGDA, changed(gb.MGDA, absolute_threshold)),
    "scale_invariance": (unit_mgda, gb.MGDA),
    "permutation_equivariance": (gb.MGDA, lambda: lambda gram: torch.arange(1.0, len(gram) + 1)),
    "ties_share": (gb.MGDA, changed(gb.MGDA, first_of_ties)),
    "zero_rows_change_nothing": (unit_mgda, gb.MGDA),
    "determinism": (gb.MGDA, Alternates),
    "memoryless": (gb.MGDA, Remembers),
    "leaves_input_alone": (gb.MGDA, changed(gb.MGDA, writes)),
    "constant": (gb.Mean, SaysOtherConstant),
    "keeps_protocol": (gb.MARBLE, NoCache),
    "state_round_trip": (lambda: gb.MARBLE(interval=3), ForgetsTheAge),
    "plain_state": (gb.MARBLE, TensorState),
    "refuses_non_finite": (gb.MARBLE, SwallowsNonFinite),
}

ALL = [name for name in kit.__all__ if isinstance(getattr(kit, name), Invariant)]


def test_every_invariant_is_tried() -> None:
    assert sorted(BROKEN) == sorted(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_good_balancer_passes(name: str) -> None:
    # sqrt(2 * 1e-9): the solvers promise a relative gap of 1e-9.
    tolerance = 5e-5 if getattr(kit, name).check.__module__.endswith("symmetry") else 1e-6
    check_balancer(BROKEN[name][0], claims=[getattr(kit, name)], tolerance=tolerance, max_examples=20)


@pytest.mark.parametrize("name", ALL)
def test_a_broken_balancer_is_caught(name: str) -> None:
    with pytest.raises(ClaimError) as caught:
        check_balancer(BROKEN[name][1], claims=[getattr(kit, name)], objectives=(1, 4), max_examples=200)
    assert caught.value.failures[0].claim is getattr(kit, name)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("keeps_protocol", NeedsRowsNever),
        ("keeps_protocol", gb.MGDA),
        ("refuses_non_finite", RemembersNonFinite),
        ("state_round_trip", gb.MGDA),
        ("constant", gb.MGDA),
        ("simplex", gb.NashMTL),
        ("simplex_coefficients", gb.Mean),
        ("min_norm_optimality", lambda: lambda gram: torch.ones(len(gram))),
        ("unit_min_norm_optimality", lambda: lambda gram: torch.zeros(len(gram))),
        ("scale_equivariance", changed(gb.MGDA, lambda w, g: w * (g.trace() > 1e-4))),
        ("rests_when_stationary", gb.Mean),
    ],
)
def test_other_ways_to_break_a_claim(name: str, broken: Callable[[], Any]) -> None:
    with pytest.raises(ClaimError):
        check_balancer(broken, claims=[getattr(kit, name)], objectives=(1, 4), max_examples=200)


@pytest.mark.parametrize("name", ALL)
def test_claims_are_sentences(name: str) -> None:
    claim = getattr(kit, name).claim
    assert len(claim) > 20
    assert claim.endswith(".")
    assert getattr(kit, name).name == name
