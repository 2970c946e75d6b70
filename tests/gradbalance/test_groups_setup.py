"""Which balancer for which parameters: what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradbalance as gb
from grouped_model import Net, batch, grouped


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
