"""Turns a CLIP state dict in the layout of open_clip into transformers' ``CLIPModel``.

Both implement the same network (Radford et al. 2021) and differ in names and in two conventions: open_clip keeps the
projections of queries, keys and values as one matrix stacked in that order, and multiplies its two output projections
from the right (``x @ P``) where a linear layer computes ``x @ W.T``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from transformers import CLIPConfig

from gradbalance.errors import InvalidArgumentError

from .weights import check_keys

_WHOLE = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_TOWERS = {
    "transformer.resblocks": "text_model.encoder.layers",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
}
_LAYER = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def to_transformers(state: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The tensors of an open_clip state dict under the names and in the form that ``CLIPModel`` has them.

    Args:
        state: All tensors of a CLIP with a vision transformer.
        file: Where they are from, for errors.

    Raises:
        InvalidArgumentError: Tensors are missing, or there are others; their names are in the message.
    """
    plan = _plan({tower: count_layers(state, tower) for tower in _TOWERS})
    check_keys(set(state), set(plan), file=file, layout="a CLIP in the layout of open_clip")
    converted = {}
    for source, targets in plan.items():
        tensor = state[source].T if source in _TRANSPOSED else state[source]
        pieces = (tensor,) if len(targets) == 1 else tensor.chunk(len(targets))
        converted.update({target: piece.contiguous() for target, piece in zip(targets, pieces, strict=True)})
    return converted


def clip_config(state: dict[str, Tensor], *, vision_heads: int, text_heads: int, eos_token_id: int) -> CLIPConfig:
    """The configuration told by the shapes of an open_clip state dict and by the arguments, with exact GELU.

    Args:
        state: As :func:`to_transformers` accepts it.
        vision_heads: Attention heads of the vision tower.
        text_heads: Attention heads of the text tower.
        eos_token_id: Id of the token at which the text is pooled. open_clip pools at the highest id of a text.

    Raises:
        InvalidArgumentError: A number of heads that does not divide the width of its tower.
    """
    vision_width, _, patch, _ = state["visual.conv1.weight"].shape
    grid = math.isqrt(len(state["visual.positional_embedding"]) - 1)
    vocabulary, text_width = state["token_embedding.weight"].shape
    for name, heads, width in (("vision_heads", vision_heads, vision_width), ("text_heads", text_heads, text_width)):
        if heads < 1 or width % heads:
            raise InvalidArgumentError(f"`{name}` must divide the width {width} of its tower. Found {heads}.")
    dimension = state["text_projection"].shape[1]
    vision = {
        "hidden_size": vision_width,
        "num_attention_heads": vision_heads,
        "image_size": grid * patch,
        "patch_size": patch,
        **_tower(state, "visual.transformer.resblocks"),
    }
    text = {
        "hidden_size": text_width,
        "num_attention_heads": text_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": len(state["positional_embedding"]),
        "eos_token_id": eos_token_id,
        **_tower(state, "transformer.resblocks"),
    }
    common = {"hidden_act": "gelu", "projection_dim": dimension}
    return CLIPConfig(vision_config=vision | common, text_config=text | common, projection_dim=dimension)


def count_layers(names: Iterable[str], tower: str) -> int:
    """How many layers ``tower.N.*`` the names go up to.

    >>> count_layers(["visual.blocks.0.ln_1.bias", "visual.blocks.11.ln_1.bias", "visual.proj"], "visual.blocks")
    12
    """
    numbers = (re.match(rf"{re.escape(tower)}\.(\d+)\.", name) for name in names)
    return max((int(number[1]) for number in numbers if number), default=-1) + 1


def _tower(state: dict[str, Tensor], tower: str) -> dict[str, int]:
    return {
        "num_hidden_layers": count_layers(state, tower),
        "intermediate_size": len(state[f"{tower}.0.mlp.c_fc.weight"]),
    }


def _plan(layers: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Which tensors each tensor becomes."""
    plan: dict[str, tuple[str, ...]] = {source: (target,) for source, target in (_WHOLE | _TRANSPOSED).items()}
    for tower, count in layers.items():
        for i in range(count):
            there = f"{_TOWERS[tower]}.{i}"
            for kind in ("weight", "bias"):
                plan |= {f"{tower}.{i}.{a}.{kind}": (f"{there}.{b}.{kind}",) for a, b in _LAYER.items()}
                plan[f"{tower}.{i}.attn.in_proj_{kind}"] = tuple(f"{there}.self_attn.{x}_proj.{kind}" for x in "qkv")
    return plan
