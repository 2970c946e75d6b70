"""Faults that users of other libraries met, each as a small scenario; docs/decisions/faults.md has the whole list."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbalance import (
    MARBLE,
    MGDA,
    BalancedOptimizer,
    CollectorError,
    Fixed,
    InvalidArgumentError,
    Mean,
    NashMTL,
    NonFiniteError,
    RanksError,
    backward,
    min_norm,
    nash,
)

# Those that are told one number per objective take K, 2 if left out.
METHODS: dict[str, Callable[..., Any]] = {
    "Mean": Mean,
    "Fixed": lambda count=2: Fixed([1, 2, 4][:count]),
    "MGDA": MGDA,
    "MGDA normalized": lambda: MGDA(normalize=True),
    "MGDA floor": lambda: MGDA(floor=0.1),
    "MGDA preference": lambda count=2: MGDA(preference=[1, 3, 2][:count]),
    "NashMTL": lambda: NashMTL(interval=2),
    "MARBLE": lambda: MARBLE(interval=2),
    "MARBLE coefficients": lambda: MARBLE(interval=2, amortize="coefficients"),
    "MARBLE preference": lambda count=2: MARBLE(interval=2, preference=[1, 3, 2][:count]),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
every_solver = pytest.mark.parametrize("make", list(METHODS.values())[2:], ids=list(METHODS)[2:])


def flat(parameters: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in parameters])


# --- solvers


@every_method
def test_a_row_whose_squared_norm_underflows(make: Callable[[], Any]) -> None:
    """In float32 the product of the rows is representable and the squared norm is 0: 0 / 0 in a projection."""
    weight = nn.Parameter(torch.ones(2))
    info = backward({"a": weight[0] * 1.0, "b": weight[0] * -1e-23}, [weight], make())
    assert torch.isfinite(info.weights).all()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("count", [6, 64])
@pytest.mark.parametrize("distance", [1e-4, 1e-8, 1e-12])
def test_near_duplicates_end_within_the_caps(count: int, distance: float) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = torch.ones(1, 80) + distance * torch.randn(count, 80, generator=generator, dtype=torch.float64)
    nearest, bargained = min_norm(rows @ rows.T), nash(rows @ rows.T)
    assert nearest.found
    assert nearest.iterations <= 4 * count
    assert bargained.found
    assert bargained.iterations <= 100


@pytest.mark.parametrize("interval", [1, 3])
def test_nash_over_500_steps_of_drifting_rows(interval: int) -> None:
    """Norms drift over 1e-6 ... 1e6 and cosines up to 0.9999 of either sign; some points have no solution."""
    generator = np.random.default_rng(0)
    balancer = NashMTL(interval)
    solved = 0
    for step in range(500):
        if balancer.needs_rows:
            solved += 1
            angle = 0.9999 * np.sin(step / 7)
            rows = np.vstack([[1.0, 0, 0, 0], [angle, np.sqrt(1 - angle**2), 0, 0], generator.normal(size=4)])
            rows *= 10 ** (6 * np.sin(step / np.array([[31.0], [17.0], [53.0]])))
            weights = balancer(torch.from_numpy(rows @ rows.T))
            assert balancer.solution is not None
            if balancer.solution.found:
                assert balancer.solution.gap <= 1e-10
        else:
            weights = balancer.weights
        assert (weights.dtype, weights.device.type, weights.shape) == (torch.float64, "cpu", (3,))
        assert torch.isfinite(weights).all()
        assert weights.min() > 0
        balancer.step()
    assert solved == -(-500 // interval)
    assert balancer.failures < solved


@every_solver
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_methods_treat_a_row_that_is_not_finite_alike(make: Callable[[], Any], bad: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(NonFiniteError, match=r"\['b'\]"):
        backward({"a": weight.sum(), "b": (weight * torch.tensor([1.0, bad])).nan_to_num().sum()}, [weight], make())
    assert weight.grad is None


# --- autograd


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


# --- precision


@every_solver
def test_weights_for_a_mix_of_half_and_full_precision(make: Callable[[], Any]) -> None:
    """200,000 small entries: sums in half precision would stop growing at a few hundred, or overflow."""
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.zeros(200_000, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(200_000, dtype=torch.float16)),
        nn.Parameter(torch.zeros(50, dtype=torch.float32)),
    ]
    slopes = [
        [(torch.randn(p.shape, generator=generator) + mean).to(p.dtype) for p in parameters] for mean in (0.5, -0.3)
    ]
    losses = {
        name: factor * torch.stack([(p.float() * s.float()).sum() for p, s in zip(parameters, row, strict=True)]).sum()
        for name, factor, row in zip("ab", (1.0, 4.0), slopes, strict=True)
    }
    info = backward(losses, parameters, make())
    rows = torch.stack([flat(slopes[0]), 4 * flat(slopes[1])])
    torch.testing.assert_close(info.weights, make()(rows @ rows.T), rtol=1e-3, atol=0)
    assert [p.grad.dtype for p in parameters if p.grad is not None] == [p.dtype for p in parameters]


def test_float16_parameters_under_a_scaler_are_not_scaled_in_silence() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.1), MGDA(), scaler=scaler)
    optimizer.backward({"a": scaler.scale(weight.float().sum()), "b": scaler.scale(weight.float().prod())})
    optimizer.balance()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.unscale_(optimizer)


# --- several ranks


@pytest.mark.parametrize("make", [Mean, MGDA])
def test_several_ranks_and_nothing_said_is_refused(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
    weight = nn.Parameter(torch.ones(2))
    losses = {"a": weight.sum(), "b": weight.prod()}
    with pytest.raises(RanksError, match=r"found 2 ranks and none given.*ranks='ddp'"):
        backward(losses, [weight], make())
    assert weight.grad is None
    assert backward(losses, [weight], make(), ranks="alone").losses == {"a": 2.0, "b": 1.0}


# --- objectives that starve, states, and use


def test_a_shallow_objective_is_not_starved_by_a_steep_one() -> None:
    """Targets (1, 1) and (1, -1), the first 400 times as steep: the sum gives the second up, a balancer does not."""

    def progress(balancer: Any) -> list[float]:
        point = nn.Parameter(torch.zeros(2))
        optimizer = BalancedOptimizer(torch.optim.SGD([point], lr=1e-3), balancer)
        for _ in range(200):
            optimizer.zero_grad()
            steep, shallow = (point - torch.tensor([1.0, 1.0])).square(), (point - torch.tensor([1.0, -1.0])).square()
            optimizer.backward({"steep": 400 * steep.sum(), "shallow": shallow.sum()})
            optimizer.step()
        assert optimizer.info is not None
        losses = optimizer.info.losses
        return [1 - losses["steep"] / 800, 1 - losses["shallow"] / 2]

    assert progress(Mean())[1] < 0
    assert min(progress(MARBLE(interval=5))) > 0.3
    assert min(progress(MGDA(normalize=True))) > 0.3


@every_method
def test_a_parameter_without_optimizer_state_survives_saving(make: Callable[[], Any]) -> None:
    def run(resume: Any, steps: range) -> tuple[Tensor, Any]:
        used, never = nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(3))
        optimizer = BalancedOptimizer(torch.optim.Adam([used, never], lr=0.1), make())
        if resume is not None:
            used.data.copy_(resume[0])
            optimizer.load_state_dict(resume[1])
        for step in steps:
            optimizer.zero_grad()
            optimizer.backward({"a": (used - step).square().sum(), "b": used.sin().sum()})
            optimizer.step()
        assert never not in optimizer.state
        return used.detach().clone(), copy.deepcopy(optimizer.state_dict())

    whole, half = run(None, range(6)), run(None, range(3))
    json.dumps(half[1]["balancer"])
    rest = run(half, range(3, 6))
    assert torch.equal(whole[0], rest[0])


def test_accelerate_with_accumulation_scheduler_and_clipping() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for prepared in (True, False):
        torch.manual_seed(1)
        model: Any = nn.Linear(3, 2)
        parameters = list(model.parameters())
        optimizer: Any = BalancedOptimizer(torch.optim.SGD(parameters, lr=0.5), MARBLE(interval=2))
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        ours = optimizer
        if prepared:
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        for start in range(0, 8, 2):
            y = model(data[start : start + 2])
            losses = {"a": y[:, 0].square().mean() / 2, "b": (y[:, 1] - 1).square().mean() / 2}
            if prepared:
                with accelerator.accumulate(model):
                    ours.backward(losses)
                    if accelerator.sync_gradients:
                        ours.balance()
                        accelerator.clip_grad_norm_(parameters, 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                continue
            ours.backward(losses)
            if start % 4 == 2:
                ours.balance()
                assert nn.utils.clip_grad_norm_(parameters, 0.1) > 0.1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found.append((flat(parameters), ours.param_groups[0]["lr"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == 0.125


def test_no_two_methods_do_the_same() -> None:
    """Directions over a refresh, a cached step and a refresh on other rows; each method differs from each other."""
    grams = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(3, 4, generator=generator, dtype=torch.float64) * torch.tensor([[1.0], [3.0], [0.5]])
        grams.append(rows @ rows.T)
    answers: dict[str, Tensor] = {}
    for name, make in METHODS.items():
        balancer, weights = make(3) if name == "Fixed" or "preference" in name else make(), []
        for gram in (grams[0], grams[0], grams[1], grams[1]):
            due = getattr(balancer, "needs_rows", True)
            weights.append(balancer(gram) if due else balancer.weights)
            if hasattr(balancer, "step"):
                balancer.step()
        answers[name] = torch.cat(weights)
    for one, other in combinations(answers, 2):
        assert not torch.allclose(answers[one], answers[other], rtol=1e-3), (one, other)


@every_method
@pytest.mark.parametrize("wrap", [list, iter, nn.ParameterList], ids=["list", "iterator", "ParameterList"])
def test_every_method_trains_the_shared_encoder(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    encoder, heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    before, x = flat(encoder.parameters()), torch.randn(6, 3)
    h = encoder(x).tanh()
    backward(
        {"a": heads[0](h).square().mean(), "b": (heads[1](h) - 1).square().mean()},
        wrap(list(encoder.parameters())),
        make(),
    )
    torch.optim.SGD([*encoder.parameters(), *heads.parameters()], lr=0.1).step()
    assert (flat(encoder.parameters()) - before).norm() > 1e-4


@pytest.mark.parametrize("make", [lambda: MARBLE(interval=2), NashMTL, lambda: MGDA(normalize=True)])
@pytest.mark.parametrize("call", ["optimizer", "function"])
def test_an_objective_that_all_but_vanishes_makes_no_infinite_gradient(make: Any, call: str) -> None:
    """Its weight, near 1 / |g|, is beyond float32: it counts as an objective without signal, and comes back."""
    weight = nn.Parameter(torch.ones(2))
    for slope in (1e-40, 1e-3):
        balancer = make()
        optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.0), balancer)
        losses = {"faint": slope * weight[0], "loud": 2 * weight[1]}
        weight.grad = None
        if call == "optimizer":
            optimizer.backward(losses)
            info = optimizer.balance()
        else:
            info = backward(losses, [weight], balancer)
        assert weight.grad is not None
        assert torch.isfinite(weight.grad).all()
        assert weight.grad[1] > 0
        assert (weight.grad[0] > 0) == (slope == 1e-3)
        assert info.inactive == (("faint",) if slope == 1e-40 else ())
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    info = backward({"faint": 1e-40 * wide[0], "loud": 2 * wide[1]}, [wide], make())
    assert info.inactive == ()
