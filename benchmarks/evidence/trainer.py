"""The trainer of ``examples/sd35_marble.py`` inside this process, for experiments that look into it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradbalance_diffusers.assembly import (
    evaluation_prompts,
    load_policy,
    load_rewards,
    make_optimizer,
    training_prompts,
)
from gradbalance_diffusers.config import Config, OptimizerConfig
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.trainer import NFTTrainer


def trainer_in(
    folder: RunFolder,
    config: Config,
    optimizer_for: Callable[[OptimizerConfig, SD3Policy], torch.optim.Optimizer] = make_optimizer,
) -> NFTTrainer:
    """A trainer with a policy of its own that logs into ``folder``."""
    policy = load_policy(config.model, seed=config.run.seed)
    return NFTTrainer(
        config,
        policy=policy,
        rewards=load_rewards(config),
        prompts=training_prompts(config),
        evaluation_prompts=evaluation_prompts(config),
        optimizer=optimizer_for(config.optimizer, policy),
        folder=folder,
    )
