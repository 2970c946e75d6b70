"""From a configuration to the parts that the trainer is given."""

from __future__ import annotations

import torch

from .config import Config, ModelConfig, RunConfig
from .generator import MixedPrecision
from .policy import SD3Policy
from .prompts import Prompt, load_sources
from .rewards import RewardSet, make_reward
from .tiny import tiny_sd3_path


def configure_torch(config: RunConfig) -> None:
    """Threads, TF32 and the global seed of the process."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.manual_seed(config.seed)


def load_policy(config: ModelConfig, *, seed: int, mixed_precision: MixedPrecision = "no") -> SD3Policy:
    """The pipeline of ``config.path`` (hub id, local folder, or ``"tiny"``) with fresh LoRA adapters.

    Args:
        config: The ``model`` section.
        seed: Seed of the LoRA initialization.
        mixed_precision: Autocast of forward passes, ``run.mixed_precision``.
    """
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    return SD3Policy.from_pretrained(
        tiny_sd3_path() if config.path == "tiny" else config.path,
        torch_dtype=getattr(torch, config.dtype),
        device=device,
        revision=config.revision,
        variant=config.variant,
        load_t5=config.load_t5,
        encoders_on_cpu=config.text_encoders == "offload",
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        seed=seed,
        max_sequence_length=config.max_sequence_length,
        gradient_checkpointing=config.gradient_checkpointing,
        mixed_precision=mixed_precision,
    )


def load_rewards(config: Config) -> RewardSet:
    """The rewards of the configuration, scored in one thread beside the sampling."""
    rewards = {reward.name: make_reward(reward.scorer, **reward.options) for reward in config.rewards}
    return RewardSet(rewards, workers=1)


def training_prompts(config: Config) -> dict[str, list[Prompt]]:
    """Training prompts by source."""
    return load_sources(config.prompts.sources, "train")


def evaluation_prompts(config: Config) -> list[Prompt]:
    """The first ``evaluation.prompts_per_source`` held-out prompts of each source, in a fixed order."""
    sources = load_sources(config.evaluation.sources, "test", limit=config.evaluation.prompts_per_source)
    return [prompt for prompts in sources.values() for prompt in prompts]
