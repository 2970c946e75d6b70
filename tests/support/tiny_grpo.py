"""A tiny GRPO trainer, and one that checks every gradient against a reference made of TRL's own loss."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

import gradbalance as gb
from gradbalance_trl import BalancedGRPOConfig, BalancedGRPOTrainer
from tiny_policy import tiny_policy, tiny_tokenizer


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(c in "aeiou" for c in text)) - 2 * text.count("z") for text in completions]


def sometimes(completions: list[str], **_: Any) -> list[float | None]:
    """Undefined for every third completion."""
    return [None if index % 3 == 0 else float(sum(map(ord, text)) % 7) for index, text in enumerate(completions)]


class ReferenceTrainer(BalancedGRPOTrainer):
    """Forms every row by separate forwards and backward passes of TRL's loss before it trains on the batch.

    Attributes:
        twin: A balancer of its own, asked with the reference's Gramian.
        errors: Relative error of ``.grad`` as the optimizer gets it, one per optimizer step.
        refreshed: bool per step.
    """

    def __init__(self, *args: Any, twin: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.twin = twin or self._default_balancer(self.args)
        self.errors: list[float] = []
        self.refreshed: list[bool] = []
        self.reference_rows: Tensor | None = None
        self.reference_rest: Tensor | None = None
        self.lagged_weights = torch.full((len(self.rewards.names),), 1 / len(self.rewards.names), dtype=torch.float64)
        self.add_callback(_Compare(self))

    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def reference_gradient(self, inputs: dict[str, Any], advantages: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        model = self.accelerator.unwrap_model(self.model)
        loss = GRPOTrainer.compute_loss(self, model, {**inputs, "advantages": advantages})
        found = torch.autograd.grad(loss, self.trained(), allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self.trained(), strict=True)]
        return torch.cat([g.flatten() for g in flat]).double()

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        seed = self._step + 1
        per_reward = inputs["advantages_per_reward"]
        metrics = {key: list(values) for key, values in self._metrics["train"].items()}
        controller = {name: self.__dict__.get(name) for name in ("_entropy_window_stats", "entropy_coef")}
        rest = self.reference_gradient(inputs, torch.zeros(len(per_reward)), seed)
        rows = torch.stack([self.reference_gradient(inputs, column, seed) - rest for column in per_reward.T])
        self._metrics["train"].clear()
        self._metrics["train"].update(metrics)
        self.__dict__.update(controller)
        self.reference_rows = rows if self.reference_rows is None else self.reference_rows + rows
        self.reference_rest = rest if self.reference_rest is None else self.reference_rest + rest
        torch.manual_seed(seed)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def expected_gradient(self) -> Tensor:
        rows, rest = self.reference_rows, self.reference_rest
        assert rows is not None
        assert rest is not None
        if self.accelerator.num_processes > 1:
            rows, rest = self.accelerator.reduce(rows, "mean"), self.accelerator.reduce(rest, "mean")
        refresh = getattr(self.twin, "needs_rows", True)
        self.refreshed.append(refresh)
        if self.args.balance_refresh == "lagged":
            weights = self.lagged_weights
            if refresh:
                solved = self.twin(gb.gramian(rows))
            self.twin.step()
            self.lagged_weights = self.twin.weights if hasattr(self.twin, "weights") else solved
        else:
            weights = self.twin(gb.gramian(rows)) if refresh else self.twin.weights
            if hasattr(self.twin, "step"):
                self.twin.step()
        self.reference_rows = self.reference_rest = None
        return weights @ rows + rest


class _Compare(TrainerCallback):
    def __init__(self, trainer: ReferenceTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        scaler = trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        found = torch.cat([p.grad.flatten().double() for p in trainer.trained()]) / scale
        expected = trainer.expected_gradient()
        trainer.errors.append(((found - expected).norm() / expected.norm()).item())


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": ["1+1=", "2+30=", "a", "bc d"] * 8})


def make_trainer(
    folder: str,
    cls: type = BalancedGRPOTrainer,
    rewards: Any = (digits, letters, sometimes),
    *,
    tokenizer: Any = None,
    lora: bool | dict[str, Any] = False,
    dtype: torch.dtype = torch.float32,
    trainer_options: dict[str, Any] | None = None,
    config: type = BalancedGRPOConfig,
    **options: Any,
) -> Any:
    """A trainer of three steps with a refresh on the first and the third; ``options`` go to the config."""
    defaults = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if config is BalancedGRPOConfig:
        defaults["balance_interval"] = 2
    tokenizer = tokenizer or tiny_tokenizer()
    adapter = None
    if lora:
        given = lora if isinstance(lora, dict) else {}
        adapter = LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **given})
    return cls(
        tiny_policy(len(tokenizer)).to(dtype),
        list(rewards),
        config(**{**defaults, **options}),
        train_dataset=prompts(),
        processing_class=tokenizer,
        peft_config=adapter,
        **(trainer_options or {}),
    )
