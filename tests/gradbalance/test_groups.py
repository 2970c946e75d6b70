"""A balancer per group of parameters: the same as a call of `backward` for each group, at one collection of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradbalance as gb
from gradbalance.gramian import direction_cosines, joint_cosines
from gradbalance.testing import rows as any_rows
from grouped_model import NAMES, Net, batch, grouped


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rsqrt(gram: Tensor) -> Tensor:
    return gram.diagonal().rsqrt()


PAIRS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (gb.MGDA, gb.MARBLE),
    (lambda: gb.MARBLE(interval=2), lambda: gb.MARBLE(interval=3)),
    (lambda: gb.MARBLE(interval=2), lambda: gb.NashMTL(interval=2)),
    (gb.Mean, lambda: gb.MARBLE(interval=2)),
    (gb.Mean, gb.Mean),
    (gb.Mean, lambda: gb.Fixed([1.0, 1.0, 1.0])),
    (lambda: gb.Fixed([1.0, 1.0, 1.0]), lambda: gb.Fixed([1.0, 1.0, 1.0])),
    (lambda: rsqrt, lambda: rsqrt),
]


def reference(model: Net, x: Tensor, balancers: dict[str, Any], penalized: bool) -> dict[str, Tensor]:
    """One `backward` per group: of each, the gradients of its own parameters, and the plain ones of the head."""
    found: dict[str, Tensor] = {}
    for group, balancer in balancers.items():
        model.zero_grad()
        part = getattr(model, group)
        penalty = model.encoder.weight.square().sum() + model.head.bias.sum() if penalized else None
        gb.backward(model.losses(x), part.parameters(), balancer, extra_loss=penalty)
        mine = {name: value for name, value in gradients(model).items() if name.startswith((group, "head"))}
        found.update(mine)
    return found


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("penalized", [False, True])
def test_equals_a_backward_for_each_group(pair: tuple[Any, Any], penalized: bool) -> None:
    """Over refreshes of both, of one, and of none, with the parameters moving in between."""
    model, encoder, decoder = Net(), pair[0], pair[1]
    optimizer = grouped(model, encoder(), decoder())
    separate = {"encoder": encoder(), "decoder": decoder()}
    seen = set()
    for seed in range(7):
        expected = reference(model, batch(seed), separate, penalized)
        optimizer.zero_grad()
        penalty = model.encoder.weight.square().sum() + model.head.bias.sum() if penalized else None
        optimizer.backward(model.losses(batch(seed)), extra_loss=penalty)
        info = optimizer.balance()
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        seen.add(tuple(group.refreshed for group in info.groups.values()))
        optimizer.step()
    if pair == PAIRS[1]:
        assert seen == {(True, True), (True, False), (False, True), (False, False)}


@given(split=st.integers(1, 7), parts=st.integers(1, 4), seed=st.integers(0, 10**6), steps=st.integers(1, 4))
def test_any_split_of_parameters_and_of_batches(split: int, parts: int, seed: int, steps: int) -> None:
    """Eight free parameters, dealt out at random to two balancers; micro-batches add up."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(6, 8, generator=generator).double(), torch.randn(6, 3, generator=generator).double()
    mix = torch.randn(8, 3, generator=generator).double()
    order = torch.randperm(8, generator=generator).tolist()

    def losses(leaves: list[Tensor], rows: Tensor) -> list[Tensor]:
        y = (x[rows] * torch.stack(leaves)).tanh() @ mix - target[rows]
        return list(y.square().sum(0) / len(x))

    make = (lambda: gb.MARBLE(interval=2), lambda: gb.MGDA(normalize=True))
    leaves = [nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(8)]
    sets = {"one": [leaves[j] for j in order[:split]], "two": [leaves[j] for j in order[split:]]}
    inner = torch.optim.SGD([{"params": p, "balanced": name} for name, p in sets.items()], lr=0.1)
    optimizer = gb.BalancedOptimizer(inner, {"one": make[0](), "two": make[1]()})
    separate = {"one": make[0](), "two": make[1]()}
    for _ in range(steps):
        expected: dict[int, Tensor] = {}
        for name, parameters in sets.items():
            inner.zero_grad()
            gb.backward(losses(leaves, torch.arange(6)), parameters, separate[name])
            expected.update({id(p): p.grad.clone() for p in parameters if p.grad is not None})
        optimizer.zero_grad()
        for rows in torch.arange(6).tensor_split(parts):
            optimizer.backward(losses(leaves, rows))
        optimizer.balance()
        for leaf in leaves:
            torch.testing.assert_close(leaf.grad, expected[id(leaf)], rtol=1e-7, atol=1e-9)
        optimizer.step()


def passes(losses: dict[str, Tensor], counted: list[str]) -> dict[str, Tensor]:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            counted.append("pass")
            return gradient

    (first, loss), *rest = losses.items()
    return {first: Counting.apply(loss), **dict(rest)}


@pytest.mark.parametrize(
    ("encoder", "decoder", "expected"),
    [
        (gb.Mean(), gb.Mean(), 2),  # one for the two groups, one for the head
        (gb.Fixed([1.0, 1.0, 1.0]), gb.Mean(), 2),  # the head has weights of one too
        (gb.Fixed([1.0, 1.0, 1.0]), gb.Fixed([1.0, 1.0, 1.0]), 1),
        (gb.Fixed([1.0, 2.0, 1.0]), gb.Mean(), 3),
    ],
)
def test_cached_cycles_cost_one_pass_for_each_distinct_weighting(encoder: Any, decoder: Any, expected: int) -> None:
    model, counted = Net(), []
    grouped(model, encoder, decoder).backward(passes(model.losses(batch(0)), counted))
    assert len(counted) == expected


def test_linear_rows_are_collected_once_for_all_groups() -> None:
    found = []
    for recorded in (False, True):
        model = Net()
        optimizer = grouped(model, gb.MARBLE(interval=2), gb.MGDA(), module=model if recorded else None)
        for seed in range(4):
            optimizer.zero_grad()
            terms = model(batch(seed)).square().sum(1)
            advantages = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
            optimizer.backward(gb.AffineLoss.linear(terms, advantages, names=NAMES))
            info = optimizer.balance()
            assert info.collector == ("linear" if recorded else "passes")
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_info_tells_of_each_group_and_of_the_whole() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.MGDA())
    for refreshed in (True, False):
        optimizer.zero_grad()
        losses = model.losses(batch(0))
        parts = [list(model.encoder.parameters()), list(model.decoder.parameters())]
        matrices = [
            torch.stack(
                [
                    torch.cat([g.flatten() for g in torch.autograd.grad(loss, part, retain_graph=True)])
                    for loss in losses.values()
                ]
            ).double()
            for part in parts
        ]
        optimizer.backward(losses)
        info = optimizer.balance()
        assert list(info.groups) == ["encoder", "decoder"]
        assert info.refreshed
        assert info.groups["encoder"].refreshed is refreshed
        assert info.groups["decoder"].refreshed
        assert info.weights.shape == (2, 3)
        assert info.coefficients is None
        whole, direction = torch.cat(matrices, 1), []
        for group, matrix, weights in zip(info.groups.values(), matrices, info.weights, strict=True):
            assert torch.equal(group.weights, weights)
            assert group.losses == info.losses
            torch.testing.assert_close(group.gram, matrix @ matrix.T, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(
                group.cosines, direction_cosines(matrix @ matrix.T, weights), rtol=1e-4, atol=1e-6
            )
            direction.append(weights @ matrix)
        expected = nn.functional.cosine_similarity(torch.cat(direction)[None], whole)
        torch.testing.assert_close(info.cosines, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(info.norms, whole.norm(dim=1), rtol=1e-5, atol=1e-8)
        logged = gb.summary(info)
        assert logged["weight/encoder/b"] == info.weights[0, 1].item()
        assert logged["coefficient/decoder/a"] == info.groups["decoder"].coefficients[0].item()  # type: ignore[index]
        assert "weight/a" not in logged
        assert {"cosine/a", "cosine/encoder/a", "norm/c", "norm/decoder/c", "worst_cosine"} <= set(logged)
        rate = gb.ConflictRate()
        rate.update(info)
        assert rate.steps[0, 1] == 1
        optimizer.step()


@given(first=any_rows(objectives=3), second=any_rows(objectives=3), seed=st.integers(0, 10**6))
def test_joint_cosines_are_those_of_whole_rows(first: Tensor, second: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    found = joint_cosines([gb.gramian(first), gb.gramian(second)], list(weights))
    # Every row of both, each in its own columns, combined by six weights.
    both = torch.cat([first.double(), second.double()], 1)
    direction = torch.cat([weights[0] @ first.double(), weights[1] @ second.double()])
    mass = sum(float(w @ rows.double().norm(dim=1)) for w, rows in zip(weights, (first, second), strict=True))
    if direction.norm() <= 1e-5 * mass:
        return
    lengths = both.norm(dim=1) * direction.norm()
    expected = torch.where(lengths > 0, both @ direction / lengths, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
