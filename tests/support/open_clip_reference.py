"""CLIP written down plainly in the layout of open_clip's checkpoints: the slow reference for their conversion."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(c_fc=nn.Linear(width, hidden), gelu=nn.GELU(), c_proj=nn.Linear(hidden, width))
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Blocks(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(layers)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Vision(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int, grid: int, patch: int, dimension: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(grid**2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Blocks(layers, width, heads, hidden)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, dimension))

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels).flatten(2).mT
        first = self.class_embedding.expand(len(patches), 1, -1)
        x = self.ln_pre(torch.cat([first, patches], dim=1) + self.positional_embedding)
        return self.ln_post(self.transformer(x)[:, 0]) @ self.proj


class OpenCLIP(nn.Module):
    """The names of its parameters are those of open_clip's CLIP with a vision transformer."""

    def __init__(
        self,
        *,
        vision: tuple[int, int, int, int],
        text: tuple[int, int, int, int],
        grid: int,
        patch: int,
        vocabulary: int,
        length: int,
        dimension: int,
    ) -> None:
        """Towers are (layers, width, heads, hidden)."""
        super().__init__()
        self.visual = Vision(*vision, grid, patch, dimension)
        self.token_embedding = nn.Embedding(vocabulary, text[1])
        self.positional_embedding = nn.Parameter(torch.empty(length, text[1]))
        self.transformer = Blocks(*text)
        self.ln_final = nn.LayerNorm(text[1])
        self.text_projection = nn.Parameter(torch.empty(text[1], dimension))
        self.logit_scale = nn.Parameter(torch.empty(()))

    def encode_image(self, pixels: Tensor) -> Tensor:
        return self.visual(pixels)

    def encode_text(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding[:length], future)
        return self.ln_final(x)[torch.arange(len(ids)), ids.argmax(dim=-1)] @ self.text_projection


def randomize(model: nn.Module, seed: int = 0) -> None:
    """No parameter keeps a value, such as a bias of 0 or a gain of 1, that would hide that it is not used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1) / 2)
