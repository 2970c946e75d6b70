"""A very small Stable Diffusion 3 pipeline with random weights, saved once per session, and what trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from gradbalance_diffusers import assembly
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.rewards import RewardSet
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.trainer import NFTTrainer
from small_run import SMALL, Make
from small_sd3 import build_pipeline


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
