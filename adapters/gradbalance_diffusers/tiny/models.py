"""The parts of the tiny SD3 pipeline, with random weights."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from gradbalance_diffusers.tiny.scene import SIZE
from gradbalance_diffusers.tiny.tokenizer import MAX_LENGTH

LATENT_CHANNELS = 4
LATENT_SIZE = SIZE // 2
TEXT_WIDTH = 48
"""Width of each of the two text encoders; the transformer reads both side by side."""
SHIFT = 3.0
"""Timestep shift of the scheduler, as in SD3.5 Medium."""


def build_vae() -> AutoencoderKL:
    """Builds an autoencoder from (3, 32, 32) pictures to (4, 16, 16) latents: 159,291 parameters."""
    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Builds a CLIP text model of two layers, width 48."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def build_transformer() -> SD3Transformer2DModel:
    """Builds the MMDiT: 4 layers, width 96, 64 image tokens. Modulation and output start at zero, as in SD3."""
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=96,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=LATENT_SIZE // 2,
        qk_norm="rms_norm",
    )
    zeroed = [transformer.proj_out, transformer.norm_out.linear]
    zeroed += [m.linear for block in transformer.transformer_blocks for m in (block.norm1, block.norm1_context)]
    for module in zeroed:
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.zeros_(module.bias)
    return transformer


def build_pipeline(vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> StableDiffusion3Pipeline:
    """Puts a pipeline together around a given autoencoder; text encoders and transformer have random weights."""
    return StableDiffusion3Pipeline(
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
