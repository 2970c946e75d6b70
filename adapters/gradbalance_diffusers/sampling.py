"""Clean latents from the unmodified Stable Diffusion 3 pipeline, one random generator per image."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError

from .embeddings import PromptEmbeddings, encode_prompts
from .generator import SD3Generator


def sample_latents(
    policy: SD3Generator,
    embeddings: PromptEmbeddings,
    *,
    steps: int,
    seeds: Sequence[int],
    solver: Literal["dpm++2m", "euler"] = "dpm++2m",
    height: int,
    width: int,
    guidance_scale: float = 1.0,
    negative: PromptEmbeddings | None = None,
    batch_size: int | None = None,
    progress: Callable[[], Any] | None = None,
) -> Tensor:
    """Sample one image per prompt in whatever role of the policy is active; only the clean latents are kept.

    Image i starts from the noise of ``torch.Generator().manual_seed(seeds[i])``, so the result depends neither on the
    batch size (but for rounding) nor on the global random state, and
    ``pipeline(..., generator=torch.Generator().manual_seed(seed))`` gives the same picture.

    Args:
        policy: The policy, in a role (``with policy.role("old"): ...``), or any other generator.
        embeddings: Embeddings of B prompts.
        steps: Network evaluations per image, on ``policy.noise_levels(steps)``.
        seeds: B seeds.
        solver: ``"dpm++2m"`` (second-order multistep) or ``"euler"``.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        guidance_scale: 1 switches classifier-free guidance off, as DiffusionNFT needs. Other values warn, unless
            ``negative`` is given.
        negative: Embedding of the one negative prompt that guidance leads away from; None is the empty text.
        batch_size: Images per run of the pipeline; all at once if None.
        progress: Called after every step of every batch, for a progress bar.

    Returns:
        ``[B, C, h, w]`` float32 on the policy's device, without gradient.

    Raises:
        InvalidArgumentError: The numbers of seeds and prompts differ, or ``steps`` gives no valid grid.
    """
    if len(seeds) != len(embeddings):
        raise InvalidArgumentError(
            f"`seeds` must hold one seed per prompt. Found {len(seeds)} seeds for {len(embeddings)} prompts."
        )
    if batch_size is not None and batch_size < 1:
        raise InvalidArgumentError(f"`batch_size` must be at least 1 or None. Found {batch_size}.")
    policy.noise_levels(steps)  # raises if the grid is not valid, before any work
    policy.verify_role()
    sampler = policy.sampler(solver)
    embeddings = embeddings.to(policy.device, policy.dtype)
    if guidance_scale != 1.0 and negative is None:
        warnings.warn(
            f"`guidance_scale` is {guidance_scale}: DiffusionNFT trains without classifier-free guidance, and "
            "guidance during sampling is known to slow it down or to collapse it. Use 1.0 unless that is the study.",
            RuntimeWarning,
            stacklevel=2,
        )
        negative = encode_prompts(policy, [""])

    def on_step_end(pipeline: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        if progress is not None:
            progress()
        return {}

    latents = []
    for start in range(0, len(seeds), batch_size or len(seeds)):
        batch = slice(start, start + (batch_size or len(seeds)))
        conditions = embeddings.index(batch)
        extra = {}
        if guidance_scale != 1.0 and negative is not None:
            repeated = negative.to(policy.device, policy.dtype).index([0] * len(conditions))
            extra = {"negative_prompt_embeds": repeated.prompt_embeds, "negative_pooled_prompt_embeds": repeated.pooled}
        with policy.autocast():
            result = sampler(
                prompt_embeds=conditions.prompt_embeds,
                pooled_prompt_embeds=conditions.pooled,
                num_inference_steps=steps,
                guidance_scale=guidance_scale,
                height=height,
                width=width,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds[batch]],
                output_type="latent",
                callback_on_step_end=on_step_end,
                callback_on_step_end_tensor_inputs=[],
                **extra,
            )
        latents.append(result.images.float())
    return torch.cat(latents)
