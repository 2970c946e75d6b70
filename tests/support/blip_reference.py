"""ImageReward written down plainly in the layout of its checkpoint: the slow reference for its conversion."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Attention of ``[B, L, D]`` on ``[B, M, D]``, head by head; ``mask [B, M]`` is True where a key counts."""
    parts = []
    for q, k, v in zip(*(x.chunk(heads, dim=-1) for x in (query, key, value)), strict=True):
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, :], -math.inf)
        parts.append(logits.softmax(dim=-1) @ v)
    return torch.cat(parts, dim=-1)


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(attend(*self.qkv(x).chunk(3, dim=-1), self.heads))


class VisionMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = VisionAttention(width, heads), VisionMLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)


class Vision(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int, grid: int, patch: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, grid**2 + 1, width))
        self.patch_embed = PatchEmbed(width, patch)
        self.blocks = nn.ModuleList([VisionBlock(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed.proj(pixels).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Projections(nn.Module):
    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key, self.value = nn.Linear(source, width), nn.Linear(source, width)


class AddAndNorm(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, change: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(change) + x)


class TextAttention(nn.Module):
    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self = Projections(width, source)
        self.output = AddAndNorm(width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        found = attend(self.self.query(x), self.self.key(source), self.self.value(source), self.heads, mask)
        return self.output(found, x)


class Intermediate(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, hidden)


class TextLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, source: int) -> None:
        super().__init__()
        self.attention = TextAttention(width, width, heads)
        self.crossattention = TextAttention(width, source, heads)
        self.intermediate = Intermediate(width, hidden)
        self.output = AddAndNorm(width, hidden)

    def forward(self, x: Tensor, mask: Tensor, pictures: Tensor) -> Tensor:
        x = self.attention(x, x, mask)
        x = self.crossattention(x, pictures)
        return self.output(nn.functional.gelu(self.intermediate.dense(x)), x)


class TextEmbeddings(nn.Module):
    def __init__(self, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(length, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(length)[None])


class TextLayers(nn.Module):
    def __init__(self, layers: int, *sizes: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([TextLayer(*sizes) for _ in range(layers)])


class Text(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, source: int, vocabulary: int, length: int
    ) -> None:
        super().__init__()
        self.embeddings = TextEmbeddings(width, vocabulary, length)
        self.encoder = TextLayers(layers, width, heads, hidden, source)

    def forward(self, ids: Tensor, mask: Tensor, pictures: Tensor) -> Tensor:
        table = self.embeddings
        x = table.word_embeddings(ids) + table.position_embeddings.weight[: ids.shape[1]]
        x = table.LayerNorm(x)
        for layer in self.encoder.layer:
            x = layer(x, mask, pictures)
        return x


class BLIP(nn.Module):
    def __init__(
        self, vision: tuple[int, int, int, int, int, int], text: tuple[int, int, int, int], vocabulary: int, length: int
    ) -> None:
        super().__init__()
        self.visual_encoder = Vision(*vision)
        self.text_encoder = Text(*text, vision[1], vocabulary, length)
        self.vision_proj, self.text_proj = nn.Linear(vision[1], 256), nn.Linear(text[1], 256)  # of pre-training


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths, rates = [width, 1024, 128, 64, 16, 1], [0.2, 0.2, 0.1]
        layers: list[nn.Module] = []
        for i in range(5):
            layers.append(nn.Linear(widths[i], widths[i + 1]))
            if i < len(rates):
                layers.append(nn.Dropout(rates[i]))
        self.layers = nn.Sequential(*layers)


class ImageRewardReference(nn.Module):
    """The names of its parameters are those of the published checkpoint."""

    def __init__(
        self,
        *,
        vision: tuple[int, int, int, int, int, int],
        text: tuple[int, int, int, int],
        vocabulary: int,
        length: int = 512,
    ) -> None:
        """Vision is (layers, width, heads, hidden, grid, patch), text (layers, width, heads, hidden)."""
        super().__init__()
        self.blip = BLIP(vision, text, vocabulary, length)
        self.mlp = MLP(text[1])

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores ``[B]`` of pictures for the texts in the same place."""
        pictures = self.blip.visual_encoder(pixels)
        first = self.blip.text_encoder(ids, mask.bool(), pictures)[:, 0]
        return (self.mlp.layers(first)[:, 0] - 0.16717362830052426) / 1.0333394966054072


def randomize(model: nn.Module, seed: int) -> None:
    """Every parameter matters, and the score depends on picture and text by more than rounding errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_gain = "norm" in name.lower() and name.endswith("weight")
                parameter.copy_(1 + 0.3 * noise if is_gain else 0.1 * noise)
            elif ("embed" in name and not name.endswith("proj.weight")) or name.endswith("cls_token"):
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter[0].numel() ** 0.5)
