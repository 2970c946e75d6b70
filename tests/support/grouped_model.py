"""A model of two groups with a balancer each, and a head: shared by the tests of balancers per group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradbalance as gb

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


def train(model: Net, optimizer: gb.BalancedOptimizer, steps: range) -> list[Tensor]:
    weights = []
    for seed in steps:
        optimizer.zero_grad()
        optimizer.backward(model.losses(batch(seed)))
        optimizer.step()
        assert optimizer.info is not None
        weights.append(optimizer.info.weights)
    return weights
