from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers import generator
from gradbalance_diffusers.embeddings import PromptEmbeddings, encode_prompts
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.sampling import sample_latents

PROMPTS = ["a cat", "two dogs", "a cat", "42"]
SEEDS = [11, 12, 13, 14]


def sample(policy: SD3Policy, **changes: Any) -> Tensor:
    arguments: dict[str, Any] = {"steps": 4, "seeds": SEEDS, "height": 16, "width": 16} | changes
    embeddings = arguments.pop("embeddings", None)
    embeddings = encode_prompts(policy, PROMPTS) if embeddings is None else embeddings
    return sample_latents(policy, embeddings, **arguments)


@pytest.mark.parametrize("solver", ["dpm++2m", "euler"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_does_not_depend_on_the_batch_size(policy: SD3Policy, solver: str, batch_size: int) -> None:
    torch.testing.assert_close(
        sample(policy, solver=solver, batch_size=batch_size), sample(policy, solver=solver), rtol=1e-4, atol=1e-5
    )


def test_does_not_touch_or_read_the_global_random_state(policy: SD3Policy) -> None:
    torch.manual_seed(1)
    first = sample(policy)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(sample(policy), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_result(policy: SD3Policy) -> None:
    latents = sample(policy)
    assert latents.shape == (4, 4, 8, 8)
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    assert not torch.allclose(latents[0], latents[2])  # the same prompt, another seed


def test_same_seed_and_prompt_give_the_same_image(policy: SD3Policy) -> None:
    latents = sample(policy, seeds=[11, 12, 11, 14])
    torch.testing.assert_close(latents[0], latents[2])


def test_is_the_plain_pipeline_call(policy: SD3Policy, load_pipeline: Callable[[], StableDiffusion3Pipeline]) -> None:
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        prompt=PROMPTS,
        num_inference_steps=4,
        guidance_scale=1.0,
        max_sequence_length=0,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="latent",
    ).images
    with policy.role("reference"):
        assert torch.equal(sample(policy, solver="euler"), images)


def test_samples_with_the_active_role(policy: SD3Policy) -> None:
    with policy.role("old"):
        old = sample(policy)
    assert not torch.allclose(sample(policy), old)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(policy.old_parameters[name])
    assert torch.equal(sample(policy), old)


def test_guidance_warns_and_is_that_of_the_pipeline(
    policy: SD3Policy, load_pipeline: Callable[[], StableDiffusion3Pipeline]
) -> None:
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(
        prompt=PROMPTS,
        num_inference_steps=3,
        guidance_scale=4.0,
        max_sequence_length=0,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="latent",
    ).images
    with policy.role("reference"), pytest.warns(RuntimeWarning, match="guidance_scale"):
        found = sample(policy, steps=3, solver="euler", guidance_scale=4.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_progress_counts_steps_of_batches(policy: SD3Policy) -> None:
    calls: list[None] = []
    sample(policy, batch_size=3, progress=lambda: calls.append(None))
    assert len(calls) == 2 * 4


def test_the_pipeline_keeps_its_scheduler(policy: SD3Policy) -> None:
    scheduler = policy.pipeline.scheduler
    timesteps = scheduler.timesteps.clone()
    sample(policy)
    sample(policy, solver="euler")
    assert policy.pipeline.scheduler is scheduler
    assert torch.equal(scheduler.timesteps, timesteps)


def test_low_precision_base(pipeline_path: Any) -> None:
    pipeline = generator.load_pipeline(pipeline_path, torch_dtype=torch.bfloat16)
    policy = SD3Policy(pipeline, rank=4, max_sequence_length=0)
    latents = sample(policy)
    assert latents.dtype == torch.float32
    assert bool(latents.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 2]}, "2 seeds for 4 prompts"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"solver": "heun"}, "heun"),
    ],
)
def test_bad_arguments(policy: SD3Policy, changes: dict[str, Any], message: str) -> None:
    embeddings = PromptEmbeddings(torch.zeros(4, 12, 32), torch.zeros(4, 32))
    with pytest.raises(InvalidArgumentError, match=message):
        sample(policy, embeddings=embeddings, **changes)
