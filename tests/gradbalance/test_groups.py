"""A balancer per group of parameters: the same as a call of `backward` for each group, at one collection of rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradbalance as gb
from gradbalance.gramian import direction_cosines, joint_cosines
from gradbalance.testing import rows as any_rows

NAMES = ("a", "b", "c")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(4, 6)
        self.decoder = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(x).tanh()).tanh())

    def losses(self, x: Tensor) -> dict[str, Tensor]:
        y = self(x)
        return {name: (y[:, k] * (1 + 3 * k) - k).square().mean() for k, name in enumerate(NAMES)}

    def param_groups(self, head: Any = False) -> list[dict[str, Any]]:
        return [
            {"params": self.decoder.parameters(), "balanced": "decoder"},
            {"params": [self.encoder.weight], "balanced": "encoder"},
            {"params": self.head.parameters(), "balanced": head},
            {"params": [self.encoder.bias], "balanced": "encoder"},
        ]


def batch(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def grouped(model: Net, encoder: Any, decoder: Any, **options: Any) -> gb.BalancedOptimizer:
    inner = torch.optim.SGD(model.param_groups(), lr=0.05, momentum=0.9)
    return gb.BalancedOptimizer(inner, {"encoder": encoder, "decoder": decoder}, **options)


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


# --- training loops


def train(model: Net, optimizer: gb.BalancedOptimizer, steps: range) -> list[Tensor]:
    weights = []
    for seed in steps:
        optimizer.zero_grad()
        optimizer.backward(model.losses(batch(seed)))
        optimizer.step()
        assert optimizer.info is not None
        weights.append(optimizer.info.weights)
    return weights


@pytest.mark.parametrize("pause", [1, 2, 5])
def test_resumes_bit_for_bit(pause: int) -> None:
    def make() -> tuple[Net, gb.BalancedOptimizer]:
        model = Net()
        return model, grouped(model, gb.MARBLE(interval=2), gb.NashMTL(interval=3))

    model, optimizer = make()
    train(model, optimizer, range(pause))
    saved = optimizer.state_dict()
    saved["balancer"] = json.loads(json.dumps(saved["balancer"]))
    assert saved["balancer"]["class"] == {"encoder": "MARBLE", "decoder": "NashMTL"}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {k: {n: v.clone() for n, v in s.items()} for k, s in saved["state"].items()}
    expected = train(model, optimizer, range(pause, 8))
    other, resumed = make()
    other.load_state_dict(weights)
    resumed.load_state_dict({**saved, "state": buffers})
    found = train(other, resumed, range(pause, 8))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_states_that_do_not_fit_change_nothing() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.NashMTL())
    train(model, optimizer, range(3))
    before = json.dumps(optimizer.state_dict()["balancer"])
    swapped = grouped(Net(), gb.NashMTL(), gb.MARBLE(interval=2))
    single = gb.BalancedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), gb.MARBLE())
    for other in (swapped, single):
        with pytest.raises(gb.StateError, match="but the balancers are"):
            optimizer.load_state_dict(other.state_dict())
    with pytest.raises(gb.StateError, match="but the balancers are MARBLE"):
        single.load_state_dict(optimizer.state_dict())
    # The second state is refused after the first was loaded.
    broken = optimizer.state_dict()
    train(model, optimizer, range(3, 4))
    before = json.dumps(optimizer.state_dict()["balancer"])
    broken["balancer"]["state"]["decoder"]["balancer"] = "other"
    with pytest.raises(gb.StateError):
        optimizer.load_state_dict(broken)
    assert json.dumps(optimizer.state_dict()["balancer"]) == before
    broken["balancer"]["state"] = {"encoder": None}
    with pytest.raises(gb.StateError, match="a state for each of the balancers"):
        optimizer.load_state_dict(broken)
    assert json.dumps(optimizer.state_dict()["balancer"]) == before


class Averaging(nn.Module):
    """A weighting as another library would write it: its state is a live tensor, loaded in place."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
        self.refuses = refuses

    def forward(self, gram: Tensor) -> Tensor:
        self.average += gram.diagonal()
        return 1 / self.average

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        if self.refuses:
            raise KeyError("average")
        return super().load_state_dict(*arguments, **options)


def test_live_tensors_are_taken_back_too() -> None:
    model = Net()
    optimizer = grouped(model, Averaging(), Averaging(refuses=True))
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()["balancer"]["state"]["encoder"]["average"].clone()
    other = Net()
    fresh = grouped(other, Averaging(), Averaging(refuses=True))
    train(other, fresh, range(1))
    before = fresh.balancer["encoder"].average.clone()  # type: ignore[index]
    assert not torch.equal(before, saved)
    with pytest.raises(gb.StateError, match="balancer Averaging does not take the state"):
        fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.balancer["encoder"].average, before)  # type: ignore[index]
    fresh.balancer["decoder"].refuses = False  # type: ignore[index]
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.balancer["encoder"].average, saved)  # type: ignore[index]


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


@pytest.mark.parametrize("warm", [0, 1, 2])
def test_a_cycle_is_skipped_for_all_groups(warm: int) -> None:
    """The bad row is one of the encoder alone; on cached cycles, of a group that keeps its weights, and of any."""
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.MARBLE(interval=3), on_nonfinite="skip")
    train(model, optimizer, range(warm))
    state = json.dumps(optimizer.state_dict()["balancer"]["state"])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    hidden = Breaking.apply(model.encoder(batch(9)).tanh())
    y = model.head(model.decoder(hidden).tanh())
    optimizer.backward({name: y[:, k].mean() for k, name in enumerate(NAMES)})
    optimizer.step()
    assert optimizer.skipped == 1
    assert optimizer.info is not None
    assert optimizer.info.skipped == NAMES
    assert not optimizer.info.weights.any()
    assert optimizer.info.groups["decoder"].skipped == NAMES
    assert json.dumps(optimizer.state_dict()["balancer"]["state"]) == state
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_bad_row_of_one_group_is_refused_before_any_balancer_is_asked() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(), gb.MARBLE())
    state = json.dumps(optimizer.state_dict()["balancer"])
    hidden = model.encoder(batch(0)).tanh()
    optimizer.backward({"a": model.decoder(hidden).mean(), "b": model.decoder(Breaking.apply(hidden)).sum()})
    with pytest.raises(gb.NonFiniteError, match=r"\['b'\]"):
        optimizer.balance()
    assert json.dumps(optimizer.state_dict()["balancer"]) == state
    assert all(p.grad is None for p in model.parameters())


def scaled_step(
    model: Net, optimizer: gb.BalancedOptimizer, scaler: torch.amp.GradScaler, seed: int, spoil: float = 1.0
) -> None:
    optimizer.zero_grad()
    losses = model.losses(batch(seed))
    losses["b"] = losses["b"] * spoil
    optimizer.backward({name: scaler.scale(loss) for name, loss in losses.items()})
    optimizer.balance()
    scaler.step(optimizer)
    scaler.update()


class Sums:
    """Keeps the sum of the rows of the first group, of every cycle that shows some."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, rows: Sequence[Tensor], names: tuple[str, ...]) -> None:
        self.found.append(rows[0].sum(0))


def test_scaler_invariance_and_overflow() -> None:
    found = []
    for scale in (1.0, 2.0**16):
        model, scaler, fed = Net(), torch.amp.GradScaler("cpu", init_scale=scale), Sums()
        optimizer = grouped(model, gb.MARBLE(interval=2), gb.MGDA(), scaler=scaler, on_rows=fed)
        for seed in range(4):
            scaled_step(model, optimizer, scaler, seed)
        state = json.dumps(optimizer.state_dict()["balancer"])
        before = [p.detach().clone() for p in model.parameters()]
        scaled_step(model, optimizer, scaler, 4, spoil=3e38)
        assert optimizer.info is not None
        assert optimizer.info.overflow
        assert optimizer.info.groups["decoder"].overflow
        assert json.dumps(optimizer.state_dict()["balancer"]) == state
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert scaler.get_scale() == scale / 2
        assert len(fed.found) == 4
        found.append([torch.cat([p.detach().flatten() for p in model.parameters()]), *fed.found])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_dead_objectives_are_told_for_each_group() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(), gb.MARBLE())
    hidden = model.encoder(batch(0)).tanh()
    deep = model.decoder(hidden).square()
    optimizer.backward({"a": deep.mean(), "b": hidden.square().mean(), "c": 0.0 * deep.sum()})
    info = optimizer.balance()
    assert info.inactive == ("c",)
    assert info.groups["encoder"].inactive == ("c",)
    assert info.groups["decoder"].inactive == ("b", "c")
    assert info.groups["decoder"].weights.count_nonzero() == 1


def test_a_group_that_no_loss_reaches_rests() -> None:
    model = Net()
    optimizer = grouped(model, gb.MARBLE(interval=2), gb.MARBLE(interval=2))
    train(model, optimizer, range(1))
    for _ in range(2):
        optimizer.zero_grad()
        before = model.decoder.weight.detach().clone()
        hidden = model.encoder(batch(0)).tanh()
        optimizer.backward({name: hidden[:, k].square().mean() for k, name in enumerate(NAMES)})
        optimizer.step()
        assert model.decoder.weight.grad is None
        assert torch.equal(model.decoder.weight, before)


# --- which balancer for which parameters


def test_values_of_balanced_that_cannot_be_followed() -> None:
    def make(value: Any, balancer: Any) -> gb.BalancedOptimizer:
        return gb.BalancedOptimizer(torch.optim.SGD(Net().param_groups(value), lr=0.1), balancer)

    two = {"encoder": gb.MGDA(), "decoder": gb.MGDA()}
    with pytest.raises(gb.InvalidArgumentError, match=r"param_groups\[2\].*\['encoder', 'decoder'\].*found True\."):
        make(True, two)
    with pytest.raises(gb.InvalidArgumentError, match=r"found 'encodr'"):
        make("encodr", two)
    with pytest.raises(gb.InvalidArgumentError, match=r"must be True or False with a single balancer, found 'decoder'"):
        make(False, gb.MGDA())
    with pytest.raises(gb.InvalidArgumentError, match=r"found True \(it is missing\)"):
        gb.BalancedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), two)
    optimizer = make(False, two)
    with pytest.raises(gb.InvalidArgumentError, match=r"param_groups\[4\].*found 3"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "balanced": 3})
    assert len(optimizer.param_groups) == 4


def test_every_balancer_has_something_to_balance() -> None:
    model = Net()
    optimizer = gb.BalancedOptimizer(
        torch.optim.SGD(model.param_groups(), lr=0.1), {"encoder": gb.MGDA(), "decoder": gb.MGDA(), "last": gb.MGDA()}
    )
    with pytest.raises(gb.InvalidArgumentError, match=r"balancer 'last' has nothing to balance, found 0 parameters"):
        optimizer.backward(model.losses(batch(0)))
    optimizer = grouped(model, gb.MGDA(), gb.MGDA())
    model.decoder.requires_grad_(False)
    with pytest.raises(gb.InvalidArgumentError, match=r"'decoder' has nothing to balance, found 2 parameters"):
        optimizer.backward(model.losses(batch(0)))


def test_mappings_that_are_none() -> None:
    shared = gb.MARBLE()
    for balancer, message in [
        ({}, "names that are not empty strings"),
        ({"": gb.MGDA()}, "names that are not empty strings"),
        ({"encoder": shared, "decoder": shared}, "the same MARBLE for 'encoder' and 'decoder'"),
        ({"encoder": gb.MGDA(), "decoder": "marble"}, r"balancer\['decoder'\] must be callable .* found str"),
    ]:
        with pytest.raises(gb.InvalidArgumentError, match=message):
            gb.BalancedOptimizer(torch.optim.SGD(Net().param_groups(), lr=0.1), balancer)


# --- rows on their way


@pytest.mark.parametrize("single", [False, True])
def test_on_rows_sees_the_rows_of_refreshes(single: bool) -> None:
    model, seen = Net(), []
    options = {"on_rows": lambda rows, names: seen.append((torch.cat(list(rows), 1), names))}
    if single:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = gb.BalancedOptimizer(inner, gb.MARBLE(interval=2), **options)  # type: ignore[arg-type]
    else:
        optimizer = grouped(model, gb.MARBLE(interval=2), gb.MARBLE(interval=2), **options)
    for seed in range(4):
        optimizer.zero_grad()
        optimizer.backward(model.losses(batch(seed)))
        info = optimizer.balance()
        assert len(seen) == 1 + seed // 2
        if info.refreshed:
            torch.testing.assert_close(gb.gramian(seen[-1][0]), info.gram)
            assert seen[-1][1] == info.names
        optimizer.step()


def test_on_rows_feeds_a_conflict_meter() -> None:
    model, meter, other = Net(), gb.ConflictMeter(groups=3), gb.ConflictMeter(groups=3)
    optimizer = grouped(model, gb.MGDA(), gb.MGDA(), on_rows=meter.update)
    for seed in range(5):
        parameters = [*model.encoder.parameters(), *model.decoder.parameters()]
        other.measure(model.losses(batch(seed)), parameters)
        optimizer.zero_grad()
        optimizer.backward(model.losses(batch(seed)))
        optimizer.step()
    assert meter.batches == 5
    torch.testing.assert_close(meter.cosines(), other.cosines(), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_on_rows_must_be_callable() -> None:
    with pytest.raises(gb.InvalidArgumentError, match="on_rows must be callable, found ConflictMeter"):
        grouped(Net(), gb.MGDA(), gb.MGDA(), on_rows=gb.ConflictMeter())
