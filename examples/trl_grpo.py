"""GRPO on three rewards that conflict: summed, normalized one by one (GDPO), and balanced.

A language model of 100,000 parameters and a tokenizer of single characters are made in place, so nothing is downloaded.
The prompt is a number, such as ``"23:"``, and an answer should

* ``format``: be digits, commas between them and a full stop at the end, ``"9,9,5."`` (share of characters in place),
* ``brevity``: have at most six characters (minus the number above), and
* ``total``: have digits that add up to the number (minus the distance).

A number above 27 needs four digits, and commas make them too long: no answer is then best in all three. The rewards are
left in their natural units, as they are when nobody has tuned weights.

    python examples/trl_grpo.py --seeds 3 --output runs/trl

Prints a table (means over the last steps and seeds) and draws the curves. Needs `pip install "gradbalance[trl]"` and
matplotlib; some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import gradbalance as gb
from gradbalance_trl import BalancedGRPOConfig, BalancedGRPOTrainer

CHARACTERS = "0123456789,.:x "
LONGEST, SHORT, NUMBERS = 16, 6, range(5, 36)


def format_(completions: list[str], **_: Any) -> list[float]:
    """The share of characters that are where digits, commas and the full stop belong."""

    def share(text: str) -> float:
        expected = [r"\d" if place % 2 == 0 else "," for place in range(len(text) - 1)] + [r"\."]
        return sum(bool(re.fullmatch(e, c)) for e, c in zip(expected, text, strict=True)) / len(text) if text else 0.0

    return [share(text) for text in completions]


def brevity(completions: list[str], **_: Any) -> list[float]:
    """Minus the number of characters above what is short enough."""
    return [-float(max(0, len(text) - SHORT)) for text in completions]


def total(completions: list[str], number: list[int], **_: Any) -> list[float]:
    """Minus the distance between the sum of the digits and the number that was asked for."""
    sums = [sum(int(c) for c in text if c.isdigit()) for text in completions]
    return [-float(abs(found - wanted)) for found, wanted in zip(sums, number, strict=True)]


format_.__name__ = "format"
REWARDS = (format_, brevity, total)
UNITS = {"format": "share of characters", "brevity": "- characters above six", "total": "- distance"}

METHODS: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "sum (GRPO)": (GRPOTrainer, GRPOConfig, {}, {}),
    "normalized (GDPO)": (GRPOTrainer, GRPOConfig, {"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "balanced, MARBLE": (BalancedGRPOTrainer, BalancedGRPOConfig, {"balance_interval": 1}, {}),
    "balanced, Nash-MTL": (BalancedGRPOTrainer, BalancedGRPOConfig, {}, {"balancer": gb.NashMTL}),
}
COLORS = dict(zip(METHODS, ("#30343f", "#d1495b", "#0b6e99", "#3fa34d"), strict=True))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def pretrained(characters: PreTrainedTokenizerFast, steps: int = 300) -> Qwen2ForCausalLM:
    """A model that answers with random characters of random number: something to improve on, and to explore with."""
    torch.manual_seed(0)
    noise = random.Random(0)
    config = Qwen2Config(
        vocab_size=len(characters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        answers = ["".join(noise.choices("0123456789,,,,.x ", k=noise.randint(1, LONGEST - 1))) for _ in range(32)]
        texts = [f"{noise.choice(NUMBERS)}:{answer}<eos>" for answer in answers]
        batch = characters(texts, return_tensors="pt", padding=True, padding_side="right")
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def run(method: str, seed: int, steps: int, start: dict[str, Any], characters: PreTrainedTokenizerFast) -> np.ndarray:
    """Train once; the mean of each reward over the completions of every step, [steps, 3]."""
    trainer_class, config_class, options, makers = METHODS[method]
    model = pretrained(characters, steps=0)
    model.load_state_dict(start)
    numbers = random.Random(seed).choices(NUMBERS, k=8 * steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = config_class(
            folder, seed=seed, max_steps=steps, per_device_train_batch_size=64, num_generations=8, learning_rate=1e-3,
            lr_scheduler_type="constant", max_completion_length=LONGEST, logging_steps=1, save_strategy="no",
            report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False, disable_tqdm=True, **options,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": [f"{number}:" for number in numbers], "number": numbers})
        made = {name: make() for name, make in makers.items()}
        trainer = trainer_class(
            model, list(REWARDS), arguments, train_dataset=data, processing_class=characters, **made
        )
        # One line per step would bury the table.
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "rewards/total/mean" in entry]
    return np.array([[entry[f"rewards/{reward.__name__}/mean"] for reward in REWARDS] for entry in history])


def table(curves: dict[str, np.ndarray], last: int) -> str:
    """Means over the last steps: mean and standard error over seeds."""
    lines = [f"{'':20}" + "".join(f"{reward.__name__:>18}" for reward in REWARDS)]
    for method, runs in curves.items():
        ends = runs[:, -last:].mean(1)
        errors = ends.std(0, ddof=1) / len(ends) ** 0.5 if len(ends) > 1 else np.zeros(ends.shape[1])
        cells = [f"{mean:+.2f} ± {error:.2f}" for mean, error in zip(ends.mean(0), errors, strict=True)]
        lines.append(f"{method:20}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """The curve of each reward, mean and range over seeds, smoothed over ten steps."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots(1, len(REWARDS))
    for place, (axis, reward) in enumerate(zip(axes, REWARDS, strict=True)):
        for method, runs in curves.items():
            width = min(10, runs.shape[1])
            smooth = np.array([np.convolve(one[:, place], np.ones(width) / width, mode="valid") for one in runs])
            steps = np.arange(smooth.shape[1]) + width
            axis.plot(steps, smooth.mean(0), color=COLORS[method], label=method)
            axis.fill_between(steps, smooth.min(0), smooth.max(0), color=COLORS[method], alpha=0.15, linewidth=0)
        axis.set(title=f"{reward.__name__} ({UNITS[reward.__name__]})", xlabel="optimizer step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=144)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of every run")
    parser.add_argument("--output", type=Path, default=Path("runs/trl"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    # TRL still uses names of transformers that are deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning)
    characters = tokenizer()
    start = pretrained(characters).state_dict()
    runs = [(method, seed) for method in METHODS for seed in range(options.seeds)]
    found: dict[str, list[np.ndarray]] = {method: [] for method in METHODS}
    for method, seed in tqdm(runs, desc="runs"):
        found[method].append(run(method, seed, options.steps, start, characters))
    curves = {method: np.stack(done) for method, done in found.items()}
    last = min(20, options.steps)
    print(f"Rewards over the last {last} of {options.steps} steps, {options.seeds} seeds; higher is better")
    print(table(curves, last))
    np.savez(options.output / "rewards.npz", **curves)
    draw(curves, options.output / "rewards.png")
    print(f"Drawn in {options.output / 'rewards.png'}")


if __name__ == "__main__":
    main()
