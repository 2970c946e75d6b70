"""A very small Stable Diffusion 3 pipeline with random weights."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def clip_tokenizer() -> CLIPTokenizer:
    pieces = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    return CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        model_max_length=12,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config)


def t5() -> tuple[T5EncoderModel, T5Tokenizer]:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *LETTERS]
    tokenizer = T5Tokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5EncoderModel(config), tokenizer


def build_pipeline(*, with_t5: bool) -> StableDiffusion3Pipeline:
    """2 layers (the first with dual attention), d = 32, 8x8 latents of 4 channels, 16x16 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        tokenizer = clip_tokenizer()
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
            scaling_factor=1.5,
            shift_factor=0.06,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        )
        encoder_3, tokenizer_3 = t5() if with_t5 else (None, None)
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae,
            text_encoder=clip_encoder(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=clip_encoder(tokenizer),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=encoder_3,
            tokenizer_3=tokenizer_3,
        )
