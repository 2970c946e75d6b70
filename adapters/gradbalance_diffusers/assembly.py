"""From a configuration to the parts that the trainer is given."""

from __future__ import annotations

import torch
from diffusers import StableDiffusion3Pipeline

from gradbalance.errors import InvalidArgumentError

from .config import Config, ModelConfig, OptimizerConfig, RunConfig
from .generator import MixedPrecision, load_pipeline
from .policy import SD3Policy
from .prompts import Prompt, load_sources, without_held_out
from .rewards import RewardSet, make_reward
from .rewards.geneval_request import read_request
from .tiny import tiny_sd3_path


def configure_torch(config: RunConfig) -> None:
    """Threads, TF32 and the global seed of the process."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if torch.cuda.is_available():  # the precision of CPUs stays as it is
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    torch.manual_seed(config.seed)


def load_base(config: ModelConfig, *, encoders_on_cpu: bool) -> StableDiffusion3Pipeline:
    """The pipeline of ``config.path`` (hub id, local folder, or ``"tiny"``), as it is.

    Args:
        config: The ``model`` section.
        encoders_on_cpu: Leave the text encoders on the CPU.
    """
    return load_pipeline(
        tiny_sd3_path() if config.path == "tiny" else config.path,
        torch_dtype=getattr(torch, config.dtype),
        device=config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"),
        revision=config.revision,
        variant=config.variant,
        load_t5=config.load_t5,
        encoders_on_cpu=encoders_on_cpu,
    )


def load_policy(config: ModelConfig, *, seed: int, mixed_precision: MixedPrecision = "no") -> SD3Policy:
    """The pipeline of the configuration with fresh LoRA adapters.

    Args:
        config: The ``model`` section.
        seed: Seed of the LoRA initialization.
        mixed_precision: Autocast of forward passes, ``run.mixed_precision``.
    """
    return SD3Policy(
        load_base(config, encoders_on_cpu=config.text_encoders == "offload"),
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        seed=seed,
        max_sequence_length=config.max_sequence_length,
        gradient_checkpointing=config.gradient_checkpointing,
        mixed_precision=mixed_precision,
    )


def make_optimizer(config: OptimizerConfig, policy: SD3Policy) -> torch.optim.Optimizer:
    """AdamW over the trained parameters."""
    return torch.optim.AdamW(
        policy.parameters.values(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


def load_rewards(config: Config) -> RewardSet:
    """The rewards of the configuration, scored in threads beside the sampling."""
    return RewardSet(
        {reward.name: make_reward(reward.scorer, **reward.options) for reward in config.rewards},
        on_error={reward.name: reward.on_error for reward in config.rewards},
        workers=config.run.reward_threads,
        timeout=config.run.reward_timeout,
    )


def training_prompts(config: Config) -> dict[str, list[Prompt]]:
    """Training prompts by source, without any that a file of held-out prompts has, whether it is evaluated or not."""
    held_out = load_sources(config.evaluation.sources, "test")
    return _checked(config, without_held_out(load_sources(config.prompts.sources, "train"), held_out))


def evaluation_prompts(config: Config) -> list[Prompt]:
    """The first ``evaluation.prompts_per_source`` held-out prompts of each source, in a fixed order."""
    sources = load_sources(config.evaluation.sources, "test", limit=config.evaluation.prompts_per_source)
    return [prompt for prompts in _checked(config, sources).values() for prompt in prompts]


def _checked(config: Config, sources: dict[str, list[Prompt]]) -> dict[str, list[Prompt]]:
    """``sources``, after a look at whether GenEval's detector knows what they ask for: hours into a run is too late."""
    if any(reward.scorer == "geneval" for reward in config.rewards):
        for prompt in sources.get("geneval", []):
            try:
                read_request(prompt.metadata["include"], prompt.metadata.get("exclude"), prompt.metadata.get("tag"))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"The GenEval prompt {prompt.text!r} cannot be scored: {error}") from None
    return sources
