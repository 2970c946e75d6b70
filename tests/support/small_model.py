"""A small model with three losses, and optimizers over it: shared by the tests of BalancedOptimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradbalance import BalancedOptimizer


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def losses_of(model: nn.Module, x: Tensor, names: str = "abc") -> dict[str, Tensor]:
    y = model(x)
    return {name: (y[:, "abc".index(name)] * (1 + "abc".index(name))).square().mean() for name in names}


def mean_of_rows(gram: Tensor) -> Tensor:
    """As ``Mean``, which needs no rows, but for rows that are collected."""
    return torch.full((len(gram),), 1 / len(gram), dtype=torch.float64)


def sgd(model: nn.Module, balancer: Any = None, **options: Any) -> BalancedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return BalancedOptimizer(inner, mean_of_rows if balancer is None else balancer, **options)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
