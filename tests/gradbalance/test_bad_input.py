"""What goes wrong in practice gets an error that names it, from backward() and BalancedOptimizer alike."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbalance import (
    MARBLE,
    MGDA,
    AffineLoss,
    BalancedOptimizer,
    CollectorError,
    InvalidArgumentError,
    Mean,
    NonFiniteError,
    backward,
)

Run = Callable[..., Any]


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


@pytest.fixture(params=[("backward", MGDA), ("optimizer", MGDA), ("backward", Mean), ("optimizer", Mean)])
def run(request: pytest.FixtureRequest, weight: nn.Parameter) -> Run:
    """Both ways in, with a balancer that needs rows and one that does not."""
    way, default = request.param

    def call(losses: Any, balancer: Any = None, **options: Any) -> Any:
        balancer = balancer or default()
        if way == "backward":
            return backward(losses, [weight], balancer, **options)
        extra = options.pop("extra_loss", None)
        optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.1), balancer, **options)
        optimizer.backward(losses, extra_loss=extra)
        return optimizer.balance()

    return call


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: {}, "at least one objective"),
        (lambda w: [], "at least one objective"),
        (lambda w: w.sum(), r"shape \[K\], found \[\]; a single loss goes in as"),
        (lambda w: w.expand(3, 2), r"shape \[K\], found \[3, 2\]"),
        (lambda w: 3.0, "found float"),
        (lambda w: {"a": w.sum(), "b": w}, r"shape \[2\] for 'b'; reduce it"),
        (lambda w: {"a": w.sum(), "b": 1.0}, "found float for 'b'"),
        (lambda w: {"a": w.sum(), 1: w.sum()}, "names of losses must be strings, found 1"),
        (lambda w: {"a": w.sum(), "b": torch.tensor(1.0)}, r"loss 'b' needs no grad.*0\.0 \* output"),
        (lambda w: {"a": w.sum(), "b": w.sum().detach()}, "loss 'b' needs no grad"),
        (lambda w: [w.sum(), torch.tensor(1)], "'objective_1'"),
        (lambda w: AffineLoss.linear(torch.ones(2), torch.ones(2, 2)), "AffineLoss need no grad"),
    ],
)
def test_losses_of_a_wrong_form(run: Run, weight: nn.Parameter, make: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run(make(weight))
    assert weight.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("cached", [False, True])
def test_non_finite_losses_are_named(run: Run, weight: nn.Parameter, value: float, cached: bool) -> None:
    balancer = MARBLE(interval=5)
    if cached:
        run({"fine": weight.sum(), "broken": weight.prod()}, balancer)
        balancer.step()
        weight.grad = None
    state = balancer.state_dict()
    with pytest.raises(NonFiniteError, match=r"\['broken'\] are not") as caught:
        run({"fine": weight.sum(), "broken": weight.prod() * value}, balancer)
    assert caught.value.objectives == ("broken",)
    assert weight.grad is None
    assert balancer.state_dict() == state


def test_non_finite_affine_terms(run: Run, weight: nn.Parameter) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    terms = weight * torch.tensor([math.nan, 1.0])
    with pytest.raises(NonFiniteError):
        run(AffineLoss.linear(terms, torch.ones(2, 2), mask))


@pytest.mark.parametrize("extra", [torch.tensor(1.0), torch.ones(2, requires_grad=True), 0.5])
def test_extra_loss_of_a_wrong_form(run: Run, weight: nn.Parameter, extra: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="extra_loss"):
        run({"a": weight.sum()}, extra_loss=extra)
    assert weight.grad is None


def test_non_finite_extra_loss(run: Run, weight: nn.Parameter) -> None:
    with pytest.raises(NonFiniteError, match="extra_loss"):
        run({"a": weight.sum()}, extra_loss=weight.sum() * math.nan)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: [], "found none at all"),
        (lambda w: iter(()), "found none at all"),
        (lambda w: [torch.ones(2), nn.Parameter(torch.ones(1), requires_grad=False)], "found 2, all frozen"),
        (lambda w: w, r"found one tensor; put it in a list"),
        (lambda w: [w, w], "the same tensor twice"),
        (lambda w: [w * 2], "leaf tensors"),
        (lambda w: [("name", w)], "found tuple at place 0"),
    ],
)
def test_params_of_a_wrong_form(weight: nn.Parameter, make: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        backward({"a": weight.sum()}, make(weight), Mean())


def test_losses_that_reach_no_balanced_parameter(run: Run, weight: nn.Parameter) -> None:
    other = nn.Parameter(torch.ones(1))
    with pytest.raises(CollectorError, match="none of the 1 balanced parameters is reached"):
        run({"a": other.sum()}, extra_loss=weight.sum())


def test_reentrant_checkpointing_is_refused(run: Run, weight: nn.Parameter) -> None:
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(lambda t: t * weight, x, use_reentrant=True)
    with pytest.raises(CollectorError, match="use_reentrant=False"):
        run({"a": y.sum(), "b": y.square().sum()})
    assert weight.grad is None


@pytest.mark.parametrize("options", [{"collector": "fast"}, {"collector": "linear"}])
def test_collectors_that_cannot(run: Run, weight: nn.Parameter, options: dict[str, str]) -> None:
    error = InvalidArgumentError if options["collector"] == "fast" else CollectorError
    with pytest.raises(error, match="collector"):
        run({"a": weight.sum(), "b": weight.prod()}, MGDA(), **options)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("balancer", "error", "message"),
    [
        (lambda gram: [0.5, 0.5], InvalidArgumentError, "must give a tensor of 2 weights.*found list"),
        (lambda gram: torch.ones(3), InvalidArgumentError, r"must give a tensor of 2 weights.*found shape \[3\]"),
        (lambda gram: gram, InvalidArgumentError, r"found shape \[2, 2\]"),
        (lambda gram: torch.tensor([1.0, math.nan]), NonFiniteError, "for a finite Gramian"),
    ],
)
def test_balancers_that_give_no_weights(
    run: Run, weight: nn.Parameter, balancer: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run({"a": weight.sum(), "b": weight.prod()}, balancer)
    assert weight.grad is None


def test_a_balancer_that_is_half_stateful(run: Run, weight: nn.Parameter) -> None:
    class Half:
        needs_rows = False

        def __call__(self, gram: Tensor) -> Tensor:
            return gram.diagonal()

    with pytest.raises(InvalidArgumentError, match="Half has needs_rows but no weights"):
        run({"a": weight.sum(), "b": weight.prod()}, Half())


def test_another_number_of_objectives_on_a_cached_step(weight: nn.Parameter) -> None:
    balancer = MARBLE(interval=5)
    backward({"a": weight.sum(), "b": weight.prod()}, [weight], balancer)
    with pytest.raises(InvalidArgumentError, match="must give a tensor of 3 weights"):
        backward({"a": weight.sum(), "b": weight.prod(), "c": weight.max()}, [weight], balancer)


def test_all_samples_masked_is_no_error_but_seen(run: Run, weight: nn.Parameter) -> None:
    mask = torch.tensor([[True, False], [True, False]])
    info = run(AffineLoss.linear(weight * 1, torch.full((2, 2), math.nan).masked_fill(mask, 1.0), mask), MARBLE())
    assert info.inactive == ("objective_1",)
    assert info.weights.tolist() == [1.0, 0.0]
