"""BalancedOptimizer as a torch optimizer, and its cycle."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbalance import (
    MARBLE,
    MGDA,
    AffineLoss,
    BalancedOptimizer,
    CollectorError,
    InvalidArgumentError,
    Mean,
    NonFiniteError,
    StateError,
    backward,
)
from small_model import flat, losses_of, make_model, sgd


def flat_grad(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# --- being a torch optimizer


def test_shares_groups_state_and_defaults(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.backward(losses_of(model, x))
    optimizer.step()
    inner = optimizer.optimizer
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert len(optimizer.state) == 4
    assert optimizer.defaults is inner.defaults
    inner.load_state_dict(inner.state_dict())  # replaces the inner lists
    assert optimizer.param_groups is inner.param_groups
    assert "SGD" in repr(optimizer)
    assert "mean_of_rows" in repr(optimizer)


def test_learning_rate_schedulers(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, MARBLE(interval=2))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        [2],
    )
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(losses_of(model, x))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])
    assert rates[0] < rates[1] == pytest.approx(0.1)
    assert rates[-1] < 0.1


def test_accelerate_prepare(model: nn.Sequential, x: Tensor) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = sgd(model, MARBLE())
    prepared_model, prepared = accelerator.prepare(model, optimizer)
    before = flat(model)
    optimizer.backward(losses_of(prepared_model, x))
    prepared.step()
    prepared.zero_grad()
    assert not torch.equal(before, flat(model))
    assert prepared.state_dict()["balancer"]["class"] == "MARBLE"


def test_step_hooks_and_closure(model: nn.Sequential, x: Tensor) -> None:
    optimizer, seen = sgd(model), []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> float:
        optimizer.zero_grad()
        losses = losses_of(model, x)
        optimizer.backward(losses)
        return losses["a"].item()

    assert optimizer.step(closure) > 0
    assert seen == ["post"]


def test_add_param_group(model: nn.Sequential) -> None:
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "balanced": False})
    assert len(optimizer.optimizer.param_groups) == 2
    assert optimizer.param_groups[1]["balanced"] is False


# --- the cycle


@pytest.mark.parametrize("balancer", [Mean(), MGDA(), MARBLE(interval=2)])
def test_equals_backward_and_the_inner_step(x: Tensor, balancer: Any) -> None:
    ours, theirs = make_model(), make_model()
    optimizer, plain = sgd(ours, copy.deepcopy(balancer)), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(losses_of(ours, x))
        optimizer.step()
        plain.zero_grad()
        info = backward(losses_of(theirs, x), theirs.parameters(), balancer)
        plain.step()
        assert torch.equal(flat(ours), flat(theirs))
        assert optimizer.info is not None
        assert torch.equal(optimizer.info.weights, info.weights)
        assert optimizer.info.losses == info.losses


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_micro_batches_equal_one_batch(x: Tensor, affine: bool, recorded: bool, parts: int) -> None:
    """Unequal parts, masks and unequal counts, two refreshes and the cached steps between."""
    mask = torch.rand(8, 4) < 0.6
    mask[0] = True
    advantages = torch.randn(8, 4).masked_fill(~mask, torch.nan)

    def losses(model: nn.Module, rows: Tensor) -> Any:
        y = model(x[rows])
        if affine:
            return AffineLoss.linear(y.square().sum(1), advantages[rows], mask[rows], counts=mask.sum(0))
        return {name: y[:, k].square().sum() / len(x) for k, name in enumerate("abc")}

    found = []
    for count in (1, parts):
        model = make_model()
        optimizer = sgd(model, MARBLE(interval=2), module=model if recorded else None)
        for _ in range(4):
            optimizer.zero_grad()
            for rows in torch.arange(8).tensor_split(count):
                optimizer.backward(losses(model, rows))
            info = optimizer.balance()
            assert info.collector in (None, "linear" if affine and recorded else "passes")
            optimizer.step()
        found.append((flat(model), info.weights, info.loss_values))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6)


def test_gramian_of_the_sum_not_the_sum_of_gramians(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, MGDA())
    optimizer.backward(losses_of(model, x[:4]))
    optimizer.backward(losses_of(model, x[4:]))
    gram = optimizer.balance().gram
    whole = [losses_of(model, x[:4])[name] + losses_of(model, x[4:])[name] for name in "abc"]
    rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in whole]
    matrix = torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in rows]).double()
    torch.testing.assert_close(gram, matrix @ matrix.T, rtol=1e-5, atol=1e-8)


def test_balance_is_idempotent_and_allows_clipping(model: nn.Sequential, x: Tensor) -> None:
    optimizer, balancer = sgd(model, MARBLE()), None
    balancer = optimizer.balancer
    optimizer.backward(losses_of(model, x))
    info = optimizer.balance()
    state = json.dumps(balancer.state_dict())
    written = flat_grad(model)
    assert optimizer.balance() is info
    assert torch.equal(flat_grad(model), written)
    assert json.dumps(balancer.state_dict()) == state
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = flat(model)
    optimizer.step()
    assert (flat(model) - before).norm() <= 0.1 * 1.001e-3
    assert optimizer.info is info


def test_calls_out_of_order(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model)
    with pytest.raises(StateError, match=r"optimizer\.backward\(losses\) first"):
        optimizer.step()
    with pytest.raises(StateError, match=r"optimizer\.backward"):
        optimizer.balance()
    optimizer.backward(losses_of(model, x))
    optimizer.balance()
    with pytest.raises(StateError, match="after balance"):
        optimizer.backward(losses_of(model, x))
    optimizer.step()
    with pytest.raises(StateError, match="first"):
        optimizer.step()
    optimizer.backward(losses_of(model, x))
    optimizer.zero_grad()
    with pytest.raises(StateError, match="first"):
        optimizer.step()


@pytest.mark.parametrize("balancer", [Mean(), MGDA()])
def test_zero_grad_drops_an_open_cycle(model: nn.Sequential, x: Tensor, balancer: Any) -> None:
    optimizer = sgd(model, balancer)
    optimizer.backward(losses_of(model, x + 1))
    optimizer.zero_grad()
    optimizer.backward(losses_of(model, x))
    optimizer.balance()
    found = flat_grad(model)
    model.zero_grad()
    backward(losses_of(model, x), model.parameters(), balancer)
    assert torch.equal(found, flat_grad(model))


def test_plain_groups_and_foreign_leaves_get_the_plain_sum(x: Tensor) -> None:
    model, foreign = make_model(), nn.Parameter(torch.ones(()))
    optimizer = BalancedOptimizer(
        torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "balanced": False}], lr=0.1
        ),
        MARBLE(interval=2),
    )
    for _ in range(2):
        optimizer.zero_grad()
        foreign.grad = None
        for part in x.chunk(2):
            optimizer.backward({n: foreign * loss for n, loss in losses_of(model, part).items()})
        weights = optimizer.balance().weights
        losses = [sum(foreign * losses_of(model, part)[n] for part in x.chunk(2)) for n in "abc"]
        total, weighted = sum(losses), sum(w.float() * loss for w, loss in zip(weights, losses, strict=True))
        for loss, leaves in ((total, [*model[2].parameters(), foreign]), (weighted, list(model[0].parameters()))):
            for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves, retain_graph=True), strict=True):
                torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-7)
        optimizer.step()


def test_names_are_aligned_and_fixed(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, MGDA())
    optimizer.backward(losses_of(model, x, "abc"))
    optimizer.backward(losses_of(model, x, "cab"))
    info = optimizer.balance()
    assert info.names == ("a", "b", "c")
    assert info.losses["c"] == pytest.approx(2 * losses_of(model, x)["c"].item())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(InvalidArgumentError, match=r"\['a', 'b', 'c'\], found \['a', 'b'\]"):
        optimizer.backward(losses_of(model, x, "ab"))
    terms = model(x).square().sum(1)
    optimizer.backward(AffineLoss.linear(terms, torch.randn(8, 3), names=["b", "c", "a"]))
    assert optimizer.balance().names == ("a", "b", "c")


def test_change_of_objectives_within_a_cycle(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, MGDA())
    optimizer.backward(losses_of(model, x, "ab"))
    with pytest.raises(InvalidArgumentError, match=r"\['a', 'b'\], found \['a', 'c'\]"):
        optimizer.backward(losses_of(model, x, "ac"))
    optimizer.backward(losses_of(model, x, "ba"))  # the cycle is still good
    assert optimizer.balance().names == ("a", "b")


def test_a_bad_micro_batch_leaves_no_trace(model: nn.Sequential, x: Tensor) -> None:
    optimizer = sgd(model, MARBLE())
    optimizer.backward(losses_of(model, x))
    with pytest.raises(NonFiniteError, match=r"\['b'\]"):
        optimizer.backward({n: loss * (float("nan") if n == "b" else 1) for n, loss in losses_of(model, x).items()})
    assert optimizer.balance().losses == pytest.approx({n: v.item() for n, v in losses_of(model, x).items()})


@pytest.mark.parametrize("balancer", [Mean(), MGDA()])
def test_a_collection_that_fails_half_way_drops_the_cycle(model: nn.Sequential, x: Tensor, balancer: Any) -> None:
    optimizer = sgd(model, balancer)
    optimizer.backward(losses_of(model, x))
    losses = losses_of(model, x)
    losses["c"].backward()  # frees the shared graph
    with pytest.raises(CollectorError, match="extra_loss"):
        optimizer.backward(losses)
    with pytest.raises(StateError):
        optimizer.step()
