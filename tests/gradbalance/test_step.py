"""The whole road in one call, against gradients taken by hand."""

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbalance import MARBLE, MGDA, AffineLoss, Fixed, Mean, NashMTL, NonFiniteError, backward, record


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.unused = nn.Linear(2, 2)

    def losses(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"a": (self.heads[0](h) - 1).square().mean(), "b": 30 * self.heads[1](h).tanh().mean()}


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def weighted_reference(model: TwoHeads, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Trunk: sum of weighted gradients. Heads: plain gradient of the sum."""
    names = [n for n, _ in model.named_parameters() if not n.startswith("unused")]
    parameters = [dict(model.named_parameters())[n] for n in names]
    rows = [
        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in model.losses(x).values()
    ]
    return {
        n: sum((float(w) if n.startswith("trunk") else 1.0) * row[j] for w, row in zip(weights, rows, strict=True))
        for j, n in enumerate(names)
    }


@pytest.fixture
def model() -> TwoHeads:
    return TwoHeads().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(7, 4, dtype=torch.float64)


def assert_grads(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize(
    "balancer",
    [Mean(), Fixed([0.9, 0.1]), MGDA(), MGDA(normalize=True), NashMTL(), lambda gram: gram.diagonal().rsqrt()],
)
def test_trunk_balanced_heads_plain_unused_untouched(
    model: TwoHeads, x: Tensor, balancer: Callable[[Tensor], Tensor]
) -> None:
    info = backward(model.losses(x), model.trunk.parameters(), balancer)
    assert info.refreshed is not isinstance(balancer, (Mean, Fixed)), "constant weights need no rows"
    assert info.names == ("a", "b")
    assert info.inactive == ()
    assert_grads(model, weighted_reference(model, x, info.weights))
    matrix = torch.stack(
        [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(model.trunk.parameters()), retain_graph=True)]
            )
            for loss in model.losses(x).values()
        ]
    )
    if info.refreshed:
        torch.testing.assert_close(info.gram, matrix @ matrix.T)
        torch.testing.assert_close(info.norms, matrix.norm(dim=1))
        direction = info.weights @ matrix
        torch.testing.assert_close(info.cosines, matrix @ direction / matrix.norm(dim=1) / direction.norm())
    assert info.losses == pytest.approx({n: loss.item() for n, loss in model.losses(x).items()})


def test_cached_steps_never_scale_heads(model: TwoHeads, x: Tensor) -> None:
    balancer = MARBLE(interval=3)
    for step in range(5):
        model.zero_grad()
        info = backward(model.losses(x), model.trunk.parameters(), balancer)
        assert info.refreshed == (step in (0, 3))
        assert (info.gram is None) != info.refreshed
        assert (info.collector == "passes") == info.refreshed
        assert_grads(model, weighted_reference(model, x, info.weights))
        assert info.losses.keys() == {"a", "b"}


@pytest.mark.parametrize("balancer", [Mean(), MGDA(), MARBLE(interval=2)])
@pytest.mark.parametrize("share", [False, True])
def test_extra_loss_is_added_outside(
    model: TwoHeads, x: Tensor, balancer: Callable[[Tensor], Tensor], share: bool
) -> None:
    """Also where it reaches parameters that no loss does, and where it shares the losses' forward."""

    def extra(losses: dict[str, Tensor]) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return penalty + losses["a"].exp() if share else penalty

    expected_extra = dict(
        zip(grads(model), torch.autograd.grad(extra(model.losses(x)), list(model.parameters())), strict=True)
    )
    for _ in range(2):
        model.zero_grad()
        losses = model.losses(x)
        info = backward(losses, model.trunk.parameters(), balancer, extra_loss=extra(losses))
        expected = weighted_reference(model, x, info.weights)
        assert_grads(model, {n: expected.get(n, 0) + g for n, g in expected_extra.items()})


def test_existing_grad_is_accumulated_into(model: TwoHeads, x: Tensor) -> None:
    for parameter in model.trunk.parameters():
        parameter.grad = torch.ones_like(parameter)
    info = backward(model.losses(x), model.trunk.parameters(), Mean())
    expected = weighted_reference(model, x, info.weights)
    assert_grads(model, {n: g + 1 if n.startswith("trunk") else g for n, g in expected.items()})


@pytest.mark.parametrize("balancer", [Mean(), MGDA(), MARBLE(), MARBLE(amortize="coefficients")])
def test_one_objective_is_a_plain_backward(model: TwoHeads, x: Tensor, balancer: Callable[[Tensor], Tensor]) -> None:
    loss = model.losses(x)["a"]
    loss.backward()
    expected = {n: g for n, g in grads(model).items() if g is not None}
    for _ in range(2):
        model.zero_grad()
        info = backward({"a": model.losses(x)["a"]}, model.trunk.parameters(), balancer)
        assert info.weights.tolist() == [1.0]
        assert_grads(model, expected)


@pytest.mark.parametrize("form", ["dict", "list", "tuple", "tensor"])
def test_every_form_of_losses(model: TwoHeads, x: Tensor, form: str) -> None:
    losses = model.losses(x)
    given = {"dict": losses, "list": list(losses.values()), "tuple": tuple(losses.values())}.get(
        form, torch.stack(list(losses.values()))
    )
    info = backward(given, model.trunk.parameters(), MGDA())
    assert_grads(model, weighted_reference(model, x, info.weights))
    assert info.names == (("a", "b") if form == "dict" else ("objective_0", "objective_1"))


def test_losses_of_different_dtypes_and_shapes() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    backward(
        {"a": weight[:1] * 2, "b": (weight[1] * 3).double(), "c": weight.sum().bfloat16()}, [weight], Fixed([1, 1, 1])
    )
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 4]


def test_works_inside_no_grad(model: TwoHeads, x: Tensor) -> None:
    losses = model.losses(x)
    balancer = MARBLE(interval=2)
    with torch.no_grad():
        first = backward(losses, model.trunk.parameters(), balancer)
    again = model.losses(x)
    with torch.no_grad():
        second = backward(again, model.trunk.parameters(), balancer)
    torch.testing.assert_close(first.weights, second.weights)


class Watch(torch.autograd.Function):
    """Identity that saves a tensor of its own, to see when the graph lets go of it."""

    saved: weakref.ref[Tensor]

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        kept = x.clone()
        ctx.save_for_backward(kept)
        Watch.saved = weakref.ref(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (kept,) = ctx.saved_tensors
        return gradient + 0 * kept


@pytest.mark.parametrize("balancer", [Mean(), MGDA(), MARBLE(interval=2)])
@pytest.mark.parametrize("kind", ["dict", "passes", "linear", "extra", "checkpointed"])
def test_graph_is_freed_although_losses_are_held(balancer: Callable[[Tensor], Tensor], kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    for _ in range(2):
        with record(model):
            x = torch.randn(5, 3)
            y = checkpoint(model, x, use_reentrant=False) if kind == "checkpointed" else model(x)
        y = Watch.apply(y)
        losses = y.mean(0) if kind in ("dict", "extra") else AffineLoss.linear(y.square().sum(1), torch.randn(5, 3))
        assert Watch.saved() is not None
        extra = model[0].weight.square().sum() if kind == "extra" else None
        collector = kind if kind in ("passes", "linear") else "auto"
        backward(losses, model.parameters(), balancer, extra_loss=extra, collector=collector)  # type: ignore[arg-type]
        assert Watch.saved() is None
        del losses


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(2, 5), st.booleans(), st.booleans())
def test_marble_cached_direction_on_the_same_batch(seed: int, objectives: int, affine: bool, linear: bool) -> None:
    """`amortize="direction"` caches what was solved for: the second step repeats the first, with one backward pass."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, objectives)).double()
    x, advantages = torch.randn(8, 4).double(), torch.randn(8, objectives).double()
    mask = torch.rand(8, objectives) < 0.8
    mask[0] = True

    def losses() -> Tensor | AffineLoss:
        with record(model):
            y = model(x)
        return AffineLoss.linear(y.square().sum(1), advantages, mask) if affine else y.square().mean(0)

    balancer, found = MARBLE(interval=2), []
    for step in range(2):
        model.zero_grad()
        collector = "linear" if linear and affine else "auto"
        info = backward(losses(), model.parameters(), balancer, collector=collector)  # type: ignore[arg-type]
        assert info.refreshed == (step == 0)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (found[0] - found[1]).norm() <= 1e-6 * found[0].norm() + 1e-12


def test_dead_objectives_are_seen_and_left_out() -> None:
    model = nn.Linear(3, 1)
    mask = torch.tensor([[True, False, True]] * 6)
    terms = model(torch.randn(6, 3)).squeeze(1)
    loss = AffineLoss.linear(
        terms, torch.randn(6, 3) * torch.tensor([1.0, 1.0, 0.0]), mask, names=["a", "masked", "flat"]
    )
    info = backward(loss, model.parameters(), MARBLE())
    assert info.inactive == ("masked", "flat")
    assert info.weights[1:].tolist() == [0, 0]
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()


def test_non_finite_rows_write_nothing_and_leave_the_balancer(model: TwoHeads, x: Tensor) -> None:
    """Finite losses with an infinite gradient."""
    balancer = MARBLE()
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(NonFiniteError, match=r"gradients of objectives \['root'\]") as caught:
        backward({"line": weight.sum(), "root": weight.sum().sqrt()}, [weight], balancer, extra_loss=weight.sum())
    assert caught.value.objectives == ("root",)
    assert weight.grad is None
    assert balancer.needs_rows
    assert balancer.state_dict() == MARBLE().state_dict()


def test_linear_and_passes_give_the_same_step() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, advantages = torch.randn(8, 4).double(), torch.randn(8, 5).double()
    found = []
    for collector in ("linear", "passes", "auto"):
        model.zero_grad()
        with record(model):
            loss = AffineLoss.linear(model(x).square().sum(1), advantages)
        info = backward(loss, model.parameters(), MGDA(), collector=collector)  # type: ignore[arg-type]
        assert info.collector == ("passes" if collector == "passes" else "linear")
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_checkpointed_recorded_forward_on_a_cached_step_and_with_extra_loss() -> None:
    """Every pass through a recorded, checkpointed forward must recompute it recorded."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    head = nn.Linear(2, 2).double()
    x, advantages = torch.randn(8, 4).double(), torch.randn(8, 5).double()
    for balancer in (Mean(), MGDA(), MARBLE(interval=2)):
        for _ in range(2):
            model.zero_grad()
            head.zero_grad()
            with record(model):
                y = checkpoint(model, x, use_reentrant=False)
            loss = AffineLoss.linear(head(y).square().sum(1), advantages)
            info = backward(loss, model.parameters(), balancer, extra_loss=y.square().sum())
            plain = model(x)
            reference = AffineLoss.linear(head(plain).square().sum(1), advantages)
            expected = torch.autograd.grad(
                reference.scalarize(info.weights) + plain.square().sum(), list(model.parameters()), retain_graph=True
            )
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
            (head_gradient,) = torch.autograd.grad(reference.scalarize(torch.ones(5)), [head.weight])
            torch.testing.assert_close(head.weight.grad, head_gradient)
