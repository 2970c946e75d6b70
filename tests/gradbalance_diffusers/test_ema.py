from __future__ import annotations

import pytest
import torch
from torch import nn

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers.ema import WeightEMA


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=g)) for name, shape in (("a", (3, 2)), ("b", (4,)))}


def move(params: dict[str, nn.Parameter], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in params.values():
            p.add_(torch.randn(p.shape, generator=g))


def snapshot(params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


@pytest.mark.parametrize("warmup", [True, False])
def test_follows_the_formula(warmup: bool) -> None:
    params = parameters()
    ema = WeightEMA(params, decay=0.9, warmup=warmup)
    expected = {name: p.detach().double() for name, p in params.items()}
    for k in range(1, 101):
        move(params, k)
        ema.update()
        d = min((1 + k) / (10 + k), 0.9) if warmup else 0.9
        assert ema.decay_at(k) == d
        expected = {name: d * m + (1 - d) * params[name].detach().double() for name, m in expected.items()}
    with ema.applied():
        for name, p in params.items():
            torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-5)
    assert ema.decay == 0.9


def test_differs_from_its_start_after_updates() -> None:
    params = parameters()
    start = snapshot(params)
    ema = WeightEMA(params)
    for k in range(10):
        move(params, k)
        ema.update()
    average = ema.state_dict()["average"]
    assert not any(torch.equal(average[name], start[name]) for name in start)
    assert not any(torch.equal(average[name], params[name]) for name in start)


def test_own_weights_come_back_bit_for_bit() -> None:
    params = parameters()
    ema = WeightEMA(params)
    move(params, 1)
    ema.update()
    move(params, 2)
    own, addresses = snapshot(params), {name: p.data_ptr() for name, p in params.items()}
    with ema.applied():
        assert not torch.equal(params["a"], own["a"])
    assert all(torch.equal(p, own[name]) for name, p in params.items())
    assert {name: p.data_ptr() for name, p in params.items()} == addresses
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert all(torch.equal(p, own[name]) for name, p in params.items())


def test_evaluating_often_changes_no_training() -> None:
    results = []
    for evaluate in (True, False):
        params = parameters()
        ema = WeightEMA(params)
        for k in range(5):
            move(params, k)
            ema.update()
            if evaluate:
                with ema.applied():
                    pass
        results.append((snapshot(params), ema.state_dict()["average"]))
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_update_and_nesting_inside_applied_are_refused() -> None:
    ema = WeightEMA(parameters())
    with ema.applied():
        with pytest.raises(StateError, match="update"):
            ema.update()
        with pytest.raises(StateError, match="nested"), ema.applied():
            pass
    ema.update()
    assert ema.updates == 1


def test_resumes_bit_for_bit() -> None:
    params = parameters()
    ema = WeightEMA(params)
    for k in range(6):
        if k == 3:
            saved = (snapshot(params), ema.state_dict())
        move(params, k)
        ema.update()
    resumed_params = {name: nn.Parameter(tensor) for name, tensor in saved[0].items()}
    resumed = WeightEMA(resumed_params)
    resumed.load_state_dict(saved[1])
    for k in range(3, 6):
        move(resumed_params, k)
        resumed.update()
    assert resumed.updates == ema.updates == 6
    expected, found = ema.state_dict()["average"], resumed.state_dict()["average"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_state_of_other_parameters_is_refused() -> None:
    ema = WeightEMA(parameters())
    before = ema.state_dict()
    renamed = {"updates": 1, "average": {"a": torch.zeros(3, 2), "c": torch.zeros(4)}}
    with pytest.raises(InvalidArgumentError, match="'b', 'c'"):
        ema.load_state_dict(renamed)
    reshaped = {"updates": 1, "average": {"a": torch.zeros(3, 2), "b": torch.zeros(5)}}
    with pytest.raises(InvalidArgumentError, match="'b'"):
        ema.load_state_dict(reshaped)
    assert ema.updates == 0
    assert all(torch.equal(t, before["average"][name]) for name, t in ema.state_dict()["average"].items())


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="decay"):
        WeightEMA(parameters(), decay=1.0)
    with pytest.raises(InvalidArgumentError, match="parameters"):
        WeightEMA({})
