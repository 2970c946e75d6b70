"""Faults on the way through autograd that users met; docs/decisions/faults.md has the whole list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from every_method import every_method, flat
from gradbalance import MARBLE, MGDA, BalancedOptimizer, CollectorError, InvalidArgumentError, backward


def odd_parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(3)),
        nn.Parameter(torch.randn(2, 3, 4)),
        nn.Parameter(torch.randn(0)),
        nn.Parameter(torch.randn(4, 5).t()),
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
    ]


@every_method
def test_shapes_and_strides_of_gradients(make: Callable[[], Any]) -> None:
    """A refresh and a cached step leave ``.grad`` as ``loss.backward()`` does."""
    parameters, balancer = odd_parameters(), make()
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        losses = {"a": sum((p * p).sum() for p in parameters), "b": sum((3 * p).sin().sum() for p in parameters)}
        info = backward(losses, parameters, balancer)
        for parameter in parameters:
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.stride() == parameter.stride()
            one, other = info.weights.tolist()
            expected = one * 2 * parameter.detach() + other * 3 * (3 * parameter.detach()).cos()
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
        if info.gram is not None:
            rows = torch.stack([flat(2 * p for p in parameters), flat(3 * (3 * p).cos() for p in parameters)])
            torch.testing.assert_close(info.gram, rows @ rows.T, rtol=1e-5, atol=1e-5)
        if hasattr(balancer, "step") and info.refreshed:
            assert not balancer.needs_rows


def test_adapters_behind_a_frozen_input_train_under_checkpointing() -> None:
    torch.manual_seed(0)
    base, down, up = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    nn.init.zeros_(up.weight)
    adapters = [down.weight, up.weight]
    optimizer = BalancedOptimizer(torch.optim.SGD(adapters, lr=0.1), MARBLE(interval=2))
    before, frozen = [p.detach().clone() for p in adapters], flat(base.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        y = checkpoint(lambda x: base(x) + up(down(x)), torch.ones(5, 4), use_reentrant=False)
        optimizer.backward({"a": y[:, 0].square().mean(), "b": (y[:, 1] - 3).square().mean()})
        optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(adapters, before, strict=True))
    assert torch.equal(flat(base.parameters()), frozen)


def test_recomputed_dropout_is_the_same_for_every_objective() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    x, found = torch.randn(8, 4), []
    for recompute in (False, True):
        layers.zero_grad()
        torch.manual_seed(1)
        y = checkpoint(layers, x, use_reentrant=False) if recompute else layers(x)
        info = backward({"a": y[:, 0].square().mean(), "b": y[:, 1].square().mean()}, layers.parameters(), MGDA())
        found.append((info.gram, flat(p.grad for p in layers.parameters())))
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain)


@every_method
def test_unused_and_frozen_parameters_do_not_decay(make: Callable[[], Any]) -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = BalancedOptimizer(torch.optim.AdamW([used, unused, frozen], lr=0.1, weight_decay=0.5), make())
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward({"a": (used * frozen).sum(), "b": used.square().sum()})
        optimizer.step()
    assert unused.tolist() == frozen.tolist() == [1, 1]
    assert used.max() < 1


def test_groups_that_overlap_are_refused() -> None:
    shared, head = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = BalancedOptimizer(torch.optim.SGD([shared], lr=0.1), MGDA())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [shared, head], "balanced": False})
    with pytest.raises(InvalidArgumentError, match="twice"):
        backward({"a": shared.sum()}, [shared, head, shared], MGDA())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_with_an_objective_that_wakes_up() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    other = copy.deepcopy(eager)
    compiled, x, found = torch.compile(other, backend="aot_eager"), torch.randn(6, 3), []
    for model, parameters in ((eager, eager.parameters()), (compiled, other.parameters())):
        held = list(parameters)
        optimizer = BalancedOptimizer(torch.optim.SGD(held, lr=0.1), MARBLE(interval=2))
        for step in range(5):
            optimizer.zero_grad()
            y = model(x)
            optimizer.backward({"a": y[:, 0].square().mean(), "late": y[:, 1].square().mean() * (step >= 3)})
            optimizer.step()
        found.append(flat(held))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_a_compiled_graph_that_allows_one_pass_only_is_explained() -> None:
    weight = nn.Parameter(torch.ones(2))
    y = weight * 1

    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("This backward function was compiled with non-empty donated buffers which requires ...")

    y.register_hook(fail)
    with pytest.raises(CollectorError, match=r"objective 'a'.*donated_buffer = False"):
        backward({"a": y.sum(), "b": y.prod()}, [weight], MGDA())
    assert weight.grad is None
