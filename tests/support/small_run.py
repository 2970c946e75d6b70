"""A training run small enough for tests, and what is compared between two of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file

from gradbalance_diffusers.assembly import load_rewards
from gradbalance_diffusers.config import Config
from gradbalance_diffusers.trainer import NFTTrainer

SMALL = [
    "model.height=16",
    "model.width=16",
    "model.lora_rank=4",
    "model.device=cpu",
    "sampling.steps=2",
    "sampling.batch_size=6",
    "prompts.sources={general: tiny, ocr: tiny}",
    "prompts.mix={general: 1, ocr: 2}",
    "prompts.groups_per_epoch=3",
    "prompts.images_per_prompt=4",
    "rewards=[saturation, contrast, background]",
    "evaluation.sources={general: tiny, ocr: tiny}",
    "evaluation.prompts_per_source=3",
    "evaluation.saved_images=1",
    "evaluation.steps=2",
    "evaluation.every=2",
    "balance.interval=2",
    "optimizer.warmup_steps=2",
    "run.epochs=4",
    "run.checkpoint_every=2",
    "run.report_every=100",
]

Make = Callable[..., NFTTrainer]


def rows(trainer: NFTTrainer, kind: str) -> list[dict[str, Any]]:
    lines = trainer.folder.metrics_path.read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def outcome(trainer: NFTTrainer) -> dict[str, bytes]:
    """Everything a run leaves that must not depend on interruptions, byte for byte."""
    path = trainer.folder.path
    files = [path / "metrics.jsonl", *sorted((path / "evaluations").rglob("*.*"))]
    found = {str(file.relative_to(path)): file.read_bytes() for file in files}
    for file in sorted((path / "checkpoints" / f"step-{trainer.step:06d}").rglob("*.safetensors")):
        # Tensor by tensor: the order of the metadata in a safetensors header is not fixed.
        for name, tensor in load_file(file).items():
            found[f"{file.relative_to(path)}: {name}"] = tensor.numpy().tobytes()
    return found


class Interrupting:
    """A reward set that stops the program at a given call, as a kill would between two writes."""

    def __init__(self, config: Config, calls: int) -> None:
        self.inner, self.left = load_rewards(config), calls
        self.names = self.inner.names

    def submit(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.inner.submit(*args)


def first_gradient(trainer: NFTTrainer) -> torch.Tensor:
    """The gradient of the first optimizer step, caught before it is applied."""
    caught: list[torch.Tensor] = []

    def catch(optimizer: Any, *_: Any) -> None:
        caught.append(torch.cat([p.grad.flatten() for p in trainer.policy.parameters.values()]))

    trainer.update.inner_optimizer.register_step_pre_hook(catch)
    trainer.train_epoch(0)
    return caught[0]
