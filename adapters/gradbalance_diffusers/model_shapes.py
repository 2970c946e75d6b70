"""The sizes of a Stable Diffusion 3 model that memory and time of a run follow from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from .config import ModelConfig
from .policy import ATTENTION_PROJECTIONS, SD3Policy

CLIP_TOKENS = 77


@dataclass(frozen=True)
class ModelShapes:
    """Sizes of a model at one picture size; bytes are those of the base's dtype.

    Attributes:
        layers: Transformer blocks.
        dual_layers: Those with a second attention over the picture.
        width: Width d of the residual streams.
        image_tokens: Tokens of a picture.
        text_tokens: Tokens of a prompt.
        latent_shape: (C, h, w) of a latent.
        image_size: (H, W) in pixels.
        decoder_channels: Channels of the widest feature map of the VAE decoder at full resolution.
        element_bytes: Bytes of a number of the base.
        transformer_bytes: Frozen transformer, its positional embedding included.
        vae_bytes: VAE.
        encoder_bytes: Text encoders; 0 where there are none.
        embedding_bytes: Embedding of one prompt.
        lora_parameters: Trained values P.
        forward_flops: Floating-point operations of a forward pass of the transformer for one picture, without LoRA
            (about 1 % more).
        decode_flops: Those of decoding one picture.
    """

    layers: int
    dual_layers: int
    width: int
    image_tokens: int
    text_tokens: int
    latent_shape: tuple[int, int, int]
    image_size: tuple[int, int]
    decoder_channels: int
    element_bytes: int
    transformer_bytes: int
    vae_bytes: int
    encoder_bytes: int
    embedding_bytes: int
    lora_parameters: int
    forward_flops: int
    decode_flops: int


def shapes_of(policy: SD3Policy, config: ModelConfig) -> ModelShapes:
    """Of a loaded policy: parameters and bytes are counted, operations too, on tensors without storage."""
    pipeline = policy.pipeline
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3]
    return _shapes(
        policy.transformer.config,
        pipeline.vae.config,
        config,
        clip_tokens=pipeline.tokenizer_max_length,
        sizes=(
            _bytes(tensor for name, tensor in _tensors(policy.transformer) if "lora_" not in name),
            _bytes(tensor for _, tensor in _tensors(pipeline.vae)),
            sum(_bytes(tensor for _, tensor in _tensors(e)) for e in encoders if isinstance(e, nn.Module)),
        ),
        lora_parameters=sum(parameter.numel() for parameter in policy.parameters.values()),
        element_bytes=policy.dtype.itemsize,
    )


def sd35_medium_shapes(config: ModelConfig) -> ModelShapes:
    """Of Stable Diffusion 3.5 Medium, whose sizes are public, without its weights: to plan with."""
    with torch.device("meta"):
        transformer, vae = SD3Transformer2DModel(**SD35_MEDIUM), AutoencoderKL(**SD35_VAE)
        encoders: list[nn.Module] = [CLIPTextModelWithProjection(CLIPTextConfig(**size)) for size in SD35_CLIPS]
        if config.load_t5:
            encoders.append(T5EncoderModel(T5Config(**SD35_T5)))
    element = getattr(torch, config.dtype).itemsize
    adapted = [
        module
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(ATTENTION_PROJECTIONS)
    ]
    return _shapes(
        transformer.config,
        vae.config,
        config,
        clip_tokens=CLIP_TOKENS,
        sizes=(
            element * _numbers([transformer]),
            element * _numbers([vae]),
            element * _numbers(encoders),
        ),
        lora_parameters=sum(config.lora_rank * (m.in_features + m.out_features) for m in adapted),
        element_bytes=element,
    )


def _shapes(
    transformer: Any,
    vae: Any,
    config: ModelConfig,
    *,
    clip_tokens: int,
    sizes: tuple[int, int, int],
    lora_parameters: int,
    element_bytes: int,
) -> ModelShapes:
    factor = 2 ** (len(vae.block_out_channels) - 1)
    latent = (transformer.in_channels, config.height // factor, config.width // factor)
    text_tokens = clip_tokens + config.max_sequence_length
    with torch.device("meta"), torch.no_grad():
        network, decoder = SD3Transformer2DModel.from_config(transformer), AutoencoderKL.from_config(vae)
        with FlopCounterMode(display=False) as forward:
            network(
                hidden_states=torch.empty(1, *latent),
                timestep=torch.empty(1),
                encoder_hidden_states=torch.empty(1, text_tokens, transformer.joint_attention_dim),
                pooled_projections=torch.empty(1, transformer.pooled_projection_dim),
            )
        with FlopCounterMode(display=False) as decode:
            decoder.decode(torch.empty(1, *latent))
    return ModelShapes(
        layers=transformer.num_layers,
        dual_layers=len(transformer.dual_attention_layers),
        width=transformer.num_attention_heads * transformer.attention_head_dim,
        image_tokens=latent[1] * latent[2] // transformer.patch_size**2,
        text_tokens=text_tokens,
        latent_shape=latent,
        image_size=(config.height, config.width),
        decoder_channels=max(vae.block_out_channels[:2]),  # the last block is entered with those of the one before
        element_bytes=element_bytes,
        transformer_bytes=sizes[0],
        vae_bytes=sizes[1],
        encoder_bytes=sizes[2],
        embedding_bytes=element_bytes
        * (text_tokens * transformer.joint_attention_dim + transformer.pooled_projection_dim),
        lora_parameters=lora_parameters,
        forward_flops=forward.get_total_flops(),
        decode_flops=decode.get_total_flops(),
    )


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _numbers(modules: Iterable[nn.Module]) -> int:
    return sum(tensor.numel() for module in modules for _, tensor in _tensors(module))


# The published configuration files of the model, as far as sizes follow from them.
SD35_MEDIUM: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "dual_attention_layers": tuple(range(13)),
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
}
SD35_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
SD35_CLIPS: list[dict[str, Any]] = [{**_CLIP_L, "projection_dim": 768}, {**_CLIP_G, "projection_dim": 1280}]
SD35_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
