"""Faults of training loops (starving, states, ranks) that users met; docs/decisions/faults.md has the whole list."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from every_method import every_method, flat
from gradbalance import MARBLE, MGDA, BalancedOptimizer, Mean, RanksError, backward


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
