"""Sample pictures with the old policy and score them: the data of one epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SamplingConfig
from .embeddings import PromptEncoder, SampleEmbeddings
from .policy import SD3Policy
from .progress import progress_bar
from .prompts import Prompt
from .rewards.base import RewardSet, RewardTable
from .sampling import sample_latents


@dataclass(frozen=True)
class Rollout:
    """B scored samples.

    Attributes:
        prompts: The prompt of each sample, length B.
        latents: Clean latents x0, ``[B, C, h, w]`` float32. Nothing else of the sampling path is kept.
        embeddings: Prompt embeddings of the samples.
        rewards: R ``[B, K]`` with its mask.
        images: ``[B, 3, H, W]`` in [0, 1] on the CPU if they were asked for.
    """

    prompts: list[Prompt]
    latents: Tensor
    embeddings: SampleEmbeddings
    rewards: RewardTable
    images: Tensor | None = None


def roll_out(
    policy: SD3Policy,
    encoder: PromptEncoder,
    rewards: RewardSet,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    config: SamplingConfig,
    *,
    size: tuple[int, int],
    keep_images: bool = False,
    description: str = "sampling",
) -> Rollout:
    """Sample one picture per prompt in whatever role of the policy is active, and score it.

    Scoring of a batch runs beside the sampling of the next one when the reward set has workers. Each picture has a
    seed of its own, so the result depends on neither the batch size nor the global random state.

    Args:
        policy: The policy; enter its role first (``with policy.role("old"): ...``).
        encoder: Cache of prompt embeddings.
        rewards: What scores the pictures.
        prompts: One per picture.
        seeds: One per picture.
        config: Steps, solver and batch size.
        size: Height and width in pixels.
        keep_images: Keep the decoded pictures.
        description: Label of the progress bar.
    """
    prompts, seeds = list(prompts), list(seeds)
    batch = config.batch_size or len(prompts)
    embeddings = encoder.encode_samples([prompt.text for prompt in prompts])
    negative = encoder.encode([""]) if config.guidance_scale != 1.0 else None
    latents, images, pending = [], [], []
    for start in progress_bar(range(0, len(prompts), batch), desc=description, leave=False):
        chunk = slice(start, start + batch)
        index = torch.arange(start, min(start + batch, len(prompts)))
        x0 = sample_latents(
            policy,
            embeddings.index(index).to(policy.device),
            steps=config.steps,
            seeds=seeds[chunk],
            solver=config.solver,
            height=size[0],
            width=size[1],
            guidance_scale=config.guidance_scale,
            negative=negative,
        )
        picture = policy.decode(x0, batch_size=config.decode_batch_size).cpu()
        metadata = [{"source": prompt.source, **prompt.metadata} for prompt in prompts[chunk]]
        pending.append(rewards.submit(picture, [prompt.text for prompt in prompts[chunk]], metadata))
        latents.append(x0)
        if keep_images:
            images.append(picture)
    return Rollout(
        prompts=prompts,
        latents=torch.cat(latents),
        embeddings=embeddings,
        rewards=RewardTable.concatenate([handle.result() for handle in pending]),
        images=torch.cat(images) if keep_images else None,
    )
