"""What a refresh of the balanced GRPO trainer costs beside an ordinary micro-batch of TRL's.

Run ``python -m benchmarks trl``.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer

import gradbalance as gb
from benchmarks.report import Result, Table, times
from benchmarks.timing import take_turns
from gradbalance_trl import BalancedGRPOConfig, BalancedGRPOTrainer

VOCABULARY, PROMPT, RANK, GENERATIONS = 512, 16, 16, 4
ORDINARY, PASSES = "plain GRPO", "one pass per reward"


class MicroBatch:
    """A trainer with K rewards that refreshes on every step, and one fixed batch.

    Args:
        rewards: K.
        lora: Train adapters, or everything.
        checkpointing: Recompute activations in the backward pass.
        size: Layers, width, samples and tokens of a completion.
    """

    def __init__(self, rewards: int, *, lora: bool, checkpointing: bool, size: tuple[int, int, int, int]) -> None:
        layers, width, samples, tokens = size
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        arguments = BalancedGRPOConfig(
            tempfile.mkdtemp(), per_device_train_batch_size=samples, num_generations=GENERATIONS, bf16=False,
            max_completion_length=tokens, gradient_checkpointing=checkpointing, balance_interval=1, report_to="none",
            use_cpu=True,
        )  # fmt: skip
        vocabulary = Tokenizer(models.WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0"))
        vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        prompts = [" ".join(f"w{(i + j) % VOCABULARY}" for j in range(PROMPT)) for i in range(samples)]
        self.trainer = BalancedGRPOTrainer(
            Qwen2ForCausalLM(config),
            [_reward(k) for k in range(rewards)],
            arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w0", eos_token="w1"),
            peft_config=LoraConfig(r=RANK, target_modules="all-linear") if lora else None,
        )
        # What Trainer.train() does before its first step.
        self.model = self.trainer.model.train()
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._start_run()
        auto = self.trainer._rows
        passes = gb.BalancedOptimizer(auto.optimizer, auto.balancer, collector="passes")
        self.collectors = {"auto": auto, "passes": passes}
        examples = [{"prompt": prompts[i // GENERATIONS]} for i in range(samples)]
        self.inputs = self.trainer._generate_and_score_completions(examples)
        self.inputs["completion_mask"] = torch.ones_like(self.inputs["completion_mask"])
        logps = -torch.log(torch.tensor(float(VOCABULARY))) + 0.1 * torch.randn(self.inputs["completion_ids"].shape)
        self.off_policy = {**self.inputs, "old_per_token_logps": logps}

    def ordinary(self) -> None:
        """Forward and backward of TRL's own loss, on layers that are not recorded."""
        self.collectors["auto"].zero_grad()
        self.trainer._balance.balancer = gb.Mean()
        self.trainer.accelerator.backward(GRPOTrainer.compute_loss(self.trainer, self.model, self.inputs))

    def refresh(self, collector: Literal["auto", "passes"] = "auto", *, off_policy: bool = False) -> None:
        """Forward, rows, weights and the balanced gradient."""
        self.collectors["auto"].zero_grad()
        self.trainer._balance.balancer = self.trainer.balancer
        self.trainer._rows = self.collectors[collector]
        loss = self.trainer.compute_loss(self.model, self.off_policy if off_policy else self.inputs)
        self.trainer.accelerator.backward(loss)
        self.trainer._stepped(False)


def _reward(k: int) -> Callable[..., list[float]]:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum((k + 2) * token % 11 for token in ids)) for ids in completion_ids]

    reward.__name__ = f"reward_{k}"
    return reward


def run(quick: bool) -> Result:
    """Measure everything."""
    size = (2, 64, 8, 8) if quick else (6, 384, 8, 80)
    counts = (3,) if quick else (3, 16)
    rounds = 2 if quick else 4
    # TRL still uses names of transformers that are deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    settings = {"layers, width, samples, tokens": size, "rank": RANK}
    rows = []
    for lora, checkpointing in ((True, False), (True, True), (False, False)):
        for count in counts if lora else counts[:1]:
            batch = MicroBatch(count, lora=lora, checkpointing=checkpointing, size=size)
            settings["parameters"] = sum(p.numel() for n, p in batch.model.named_parameters() if "lora_" not in n)
            rows.append(_measured(batch, count, lora, checkpointing, rounds))
    kinds = ("on-policy", "off-policy", PASSES)
    table = Table(
        "CPU time of a micro-batch that refreshes, against one of plain GRPO",
        ["trained", "K", *kinds],
        [[row["trained"], str(row["K"]), *(_cell(row, kind) for kind in kinds)] for row in rows],
    )
    notes = [
        "A micro-batch is forward, loss and backward, with everything written to `.grad`; generation, rewards and the "
        "optimizer come on top and are the same for all. × is the median over rounds of the ratio to plain GRPO in the "
        "same round, with quartiles.",
        "Where only LoRA factors are trained, all rewards share one backward pass on-policy and two off-policy; a "
        "fully trained model takes one per reward. All on the same forward.",
    ]
    return Result("trl", settings, rows, [table], notes, {})


def _measured(batch: MicroBatch, count: int, lora: bool, checkpointing: bool, rounds: int) -> dict[str, Any]:
    candidates = {
        ORDINARY: batch.ordinary,
        "on-policy": batch.refresh,
        "off-policy": lambda: batch.refresh(off_policy=True),
    }
    # Without adapters the other two are passes already.
    if lora and not checkpointing:
        candidates[PASSES] = lambda: batch.refresh("passes")
    timings = take_turns(candidates, baseline=ORDINARY, rounds=rounds)
    row: dict[str, Any] = {
        "trained": ("LoRA" if lora else "all") + (", checkpointing" if checkpointing else ""),
        "K": count,
    }
    return row | {name: asdict(timing) for name, timing in timings.items()}


def _cell(row: dict[str, Any], kind: str) -> str:
    if kind not in row:
        return ""
    return f"{times(row[kind]['ratio'])} ({row[kind]['low']:.2f}-{row[kind]['high']:.2f})"
