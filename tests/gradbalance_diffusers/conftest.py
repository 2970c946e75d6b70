"""A very small Stable Diffusion 3 pipeline with random weights, saved once per session, and what trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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

from gradbalance_diffusers import assembly
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.rewards import RewardSet
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.trainer import NFTTrainer
from small_run import SMALL, Make

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


@pytest.fixture(scope="session")
def pipeline_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a saved random pipeline without T5."""
    path = tmp_path_factory.mktemp("sd3")
    build_pipeline(with_t5=False).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def t5_pipeline_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a saved random pipeline with T5."""
    path = tmp_path_factory.mktemp("sd3_t5")
    build_pipeline(with_t5=True).save_pretrained(path)
    return path


@pytest.fixture
def load_pipeline(pipeline_path: Path) -> Callable[[], StableDiffusion3Pipeline]:
    """A function that loads the pipeline without T5 afresh."""

    def load() -> StableDiffusion3Pipeline:
        return StableDiffusion3Pipeline.from_pretrained(
            pipeline_path, text_encoder_3=None, tokenizer_3=None, local_files_only=True
        )

    return load


@pytest.fixture
def load_policy(load_pipeline: Callable[[], StableDiffusion3Pipeline]) -> Callable[..., SD3Policy]:
    """A function that makes a policy (rank 4, alpha 8, no T5 tokens unless said) of a freshly loaded pipeline."""

    def load(**lora: object) -> SD3Policy:
        arguments: dict = {"rank": 4, "alpha": 8, "max_sequence_length": 0} | lora
        return SD3Policy(load_pipeline(), **arguments)

    return load


@pytest.fixture
def load_random_policy(load_policy: Callable[..., SD3Policy]) -> Callable[..., SD3Policy]:
    """As ``load_policy``, with noise in every LoRA tensor of both adapters: the three roles give different outputs."""

    def load(**lora: object) -> SD3Policy:
        policy = load_policy(**lora)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in (*policy.parameters.values(), *policy.old_parameters.values()):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return policy

    return load


@pytest.fixture
def policy(load_random_policy: Callable[..., SD3Policy]) -> SD3Policy:
    """A policy whose roles differ."""
    return load_random_policy()


@pytest.fixture
def make(pipeline_path: Path, tmp_path: Path) -> Iterator[Make]:
    """A function that makes a trainer in ``tmp_path / name`` from overrides."""
    folders = []

    def build(name: str = "run", *overrides: str, rewards: RewardSet | None = None, **folder: bool) -> NFTTrainer:
        config = load_config("tiny", [*SMALL, f"model.path={pipeline_path}", *overrides])
        torch.manual_seed(config.run.seed)  # as a new process would
        policy = assembly.load_policy(config.model, seed=config.run.seed, mixed_precision=config.run.mixed_precision)
        for earlier in folders:
            if earlier.path == tmp_path / name:
                earlier.close()  # as the end of its process would
        run = RunFolder(tmp_path / name, **folder)
        run.write_config(config)
        folders.append(run)
        return NFTTrainer(
            config,
            policy=policy,
            rewards=rewards or assembly.load_rewards(config),
            prompts=assembly.training_prompts(config),
            evaluation_prompts=assembly.evaluation_prompts(config),
            optimizer=torch.optim.AdamW(policy.parameters.values(), lr=config.optimizer.lr),
            folder=run,
        )

    yield build
    for folder in folders:
        folder.close()
