"""Turns the state dict of ImageReward, in the layout of BLIP's own code, into that of transformers' BLIP models.

Both implement the same network (Li et al. 2022, arXiv 2201.12086) with the same conventions: only names differ, and in
the text encoder not even those.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor
from transformers import BlipTextConfig, BlipVisionConfig

from gradbalance.errors import InvalidArgumentError

from .open_clip_keys import count_layers
from .weights import check_keys

VISION, TEXT, HEAD = "vision", "text", "head"
"""First parts of the names that tensors get here."""
LAYERS = (0, 2, 4, 6, 7)
"""Numbers of the head's linear layers; those between are dropout, which does nothing after training."""
IGNORED = frozenset(
    {
        "blip.vision_proj.weight",
        "blip.vision_proj.bias",
        "blip.text_proj.weight",
        "blip.text_proj.bias",
        "blip.text_encoder.embeddings.position_ids",
    }
)
"""Tensors that may be there and do not enter the score: projections of the pre-training, and a list of positions."""
_BLOCKS, _TEXT_LAYERS = "blip.visual_encoder.blocks", "blip.text_encoder.encoder.layer"
_WITH_BIAS = ("weight", "bias")
_BLOCK = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_ATTENTION = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
_TEXT_LAYER = (
    *(f"attention.{part}" for part in _ATTENTION),
    *(f"crossattention.{part}" for part in _ATTENTION),
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def to_transformers(state: dict[str, Tensor], file: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of `VISION` (for BlipVisionModel), `TEXT` (for BlipTextModel) and `HEAD` (linear layers 0 to 4).

    Args:
        state: All tensors of the checkpoint.
        file: Where they are from, for errors.

    Raises:
        InvalidArgumentError: Tensors are missing, or there are others; their names are in the message.
    """
    plan = _plan(count_layers(state, _BLOCKS), count_layers(state, _TEXT_LAYERS))
    check_keys(set(state) - IGNORED, set(plan), file=file, layout="ImageReward-v1.0")
    converted: dict[str, dict[str, Tensor]] = {VISION: {}, TEXT: {}, HEAD: {}}
    for source, (part, target) in plan.items():
        converted[part][target] = state[source]
    return converted


def blip_configs(
    state: dict[str, Tensor], *, vision_heads: int, text_heads: int
) -> tuple[BlipVisionConfig, BlipTextConfig]:
    """The configurations that the shapes of the state dict tell, and what they do not tell.

    Args:
        state: As :func:`to_transformers` accepts it.
        vision_heads: Attention heads of the image encoder.
        text_heads: Attention heads of the text encoder.

    Raises:
        InvalidArgumentError: A number of heads that does not divide the width of its encoder.
    """
    vision_width, _, patch, _ = state["blip.visual_encoder.patch_embed.proj.weight"].shape
    vocabulary, text_width = state["blip.text_encoder.embeddings.word_embeddings.weight"].shape
    for name, heads, width in (("vision_heads", vision_heads, vision_width), ("text_heads", text_heads, text_width)):
        if heads < 1 or width % heads:
            raise InvalidArgumentError(f"`{name}` must divide the width {width} of its encoder. Found {heads}.")
    vision = BlipVisionConfig(
        hidden_size=vision_width,
        intermediate_size=len(state[f"{_BLOCKS}.0.mlp.fc1.weight"]),
        num_hidden_layers=count_layers(state, _BLOCKS),
        num_attention_heads=vision_heads,
        image_size=math.isqrt(state["blip.visual_encoder.pos_embed"].shape[1] - 1) * patch,
        patch_size=patch,
        hidden_act="gelu",
        layer_norm_eps=1e-6,  # of BLIP's code; transformers' default is another
    )
    text = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=text_width,
        encoder_hidden_size=vision_width,
        intermediate_size=len(state[f"{_TEXT_LAYERS}.0.intermediate.dense.weight"]),
        num_hidden_layers=count_layers(state, _TEXT_LAYERS),
        num_attention_heads=text_heads,
        max_position_embeddings=len(state["blip.text_encoder.embeddings.position_embeddings.weight"]),
        hidden_act="gelu",
        layer_norm_eps=1e-12,
        is_decoder=True,  # gives the layers cross attention; the call says that no causal mask is meant
    )
    return vision, text


def _plan(blocks: int, layers: int) -> dict[str, tuple[str, str]]:
    """Which model each tensor goes to, and its name there."""
    plan = {
        "blip.visual_encoder.cls_token": (VISION, "embeddings.class_embedding"),
        "blip.visual_encoder.pos_embed": (VISION, "embeddings.position_embedding"),
    }
    for name in ("word_embeddings.weight", "position_embeddings.weight"):
        plan[f"blip.text_encoder.embeddings.{name}"] = (TEXT, f"embeddings.{name}")
    for kind in _WITH_BIAS:
        plan[f"blip.visual_encoder.patch_embed.proj.{kind}"] = (VISION, f"embeddings.patch_embedding.{kind}")
        plan[f"blip.visual_encoder.norm.{kind}"] = (VISION, f"post_layernorm.{kind}")
        plan[f"blip.text_encoder.embeddings.LayerNorm.{kind}"] = (TEXT, f"embeddings.LayerNorm.{kind}")
        for i in range(blocks):
            for a, b in _BLOCK.items():
                plan[f"{_BLOCKS}.{i}.{a}.{kind}"] = (VISION, f"encoder.layers.{i}.{b}.{kind}")
        for i in range(layers):
            for name in _TEXT_LAYER:
                plan[f"{_TEXT_LAYERS}.{i}.{name}.{kind}"] = (TEXT, f"encoder.layer.{i}.{name}.{kind}")
        for i, number in enumerate(LAYERS):
            plan[f"mlp.layers.{number}.{kind}"] = (HEAD, f"{i}.{kind}")
    return plan
