"""Small models whose rows every collector must get right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbalance.affine import AffineLoss


class Block(nn.Module):
    """Layers of rank 2, 3 and 4 inputs, one used twice, one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.twice = nn.Linear(6, 6)
        self.mixer = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4, 3, 5] -> [B, 2]."""
        h = torch.tanh(self.embed(x))  # rank 4
        h = self.mixer(h.transpose(2, 3)).transpose(2, 3).flatten(1, 2)  # rank 4, then [B, 12, 6]
        h = torch.tanh(self.twice(h))  # rank 3
        h = torch.tanh(self.twice(h) + h).mean(1)
        return self.head(h)  # rank 2


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(3)
    return Block()


@pytest.fixture
def nft_loss() -> Callable[..., AffineLoss]:
    """An NFT-like loss of a model's [B, D] outputs: 2 terms, 4 objectives, a mask and NaN behind it."""

    def make(outputs: Tensor, center: bool = False) -> AffineLoss:
        generator = torch.Generator().manual_seed(5)
        batch = len(outputs)
        r = torch.rand(batch, 4, generator=generator, dtype=torch.float64)
        mask = torch.rand(batch, 4, generator=generator) < 0.7
        mask[0] = True
        r[~mask] = float("nan")
        positive = (outputs - 1).square().flatten(1).mean(1)
        negative = (outputs + 0.5).square().flatten(1).mean(1)
        return AffineLoss.interpolate(positive, negative, r, mask, center=center, names=list("abcd"))

    return make
