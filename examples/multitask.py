"""Three tasks on one trunk: the sum of losses against MGDA, NashMTL and MARBLE.

Real data that scikit-learn ships (1,797 handwritten digits, 8x8). Every picture is turned by a random quarter turn;
the shared trunk must tell which digit it is, how it was turned, and give the picture back from 16 numbers. The losses
are left in their natural units (cross-entropy in nats, squared error in grey levels of 0-16), as they are when nobody
has tuned weights: the squared error is some thirty times larger, so the sum serves it first.

    python examples/multitask.py --seeds 5 --output runs/multitask
    torchrun --nproc_per_node 2 examples/multitask.py

Prints a table (mean and standard error over seeds, on held-out pictures) and draws it. Several ranks share every batch
and give the same result. Needs scikit-learn and matplotlib.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, mse_loss
from tqdm import tqdm

import gradbalance as gb

BATCH = 100
TASKS = ("digit", "turn", "picture")
METHODS: dict[str, Callable[[], gb.Balancer]] = {
    "sum": lambda: gb.Fixed([1.0, 1.0, 1.0]),
    "MGDA": gb.MGDA,
    "NashMTL": gb.NashMTL,
    "MARBLE": gb.MARBLE,
}


class SharedTrunk(nn.Module):
    """A trunk with a narrow code, and one linear head per task."""

    def __init__(self, width: int = 128, code: int = 16) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, code)
        )
        self.heads = nn.ModuleDict(
            {"digit": nn.Linear(code, 10), "turn": nn.Linear(code, 4), "picture": nn.Linear(code, 64)}
        )

    def losses(self, x: Tensor, digit: Tensor, turn: Tensor) -> dict[str, Tensor]:
        """One loss per task, in its natural unit."""
        code = self.trunk(x)
        return {
            "digit": cross_entropy(self.heads["digit"](code), digit),
            "turn": cross_entropy(self.heads["turn"](code), turn),
            "picture": mse_loss(self.heads["picture"](code), x),
        }

    @torch.no_grad()
    def scores(self, x: Tensor, digit: Tensor, turn: Tensor) -> dict[str, float]:
        """Accuracy of the two classifications, and the explained variance of the picture. Higher is better."""
        code = self.trunk(x)
        error = mse_loss(self.heads["picture"](code), x)
        return {
            "digit": float((self.heads["digit"](code).argmax(1) == digit).float().mean()),
            "turn": float((self.heads["turn"](code).argmax(1) == turn).float().mean()),
            "picture": 1.0 - float(error / (x - x.mean(0)).square().mean()),
        }


def data(seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Training and held-out (pictures, digits, turns); the split and the turns depend on the seed."""
    rng = np.random.default_rng(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.images))
    turn = rng.integers(0, 4, len(order))
    pictures = np.stack([np.rot90(digits.images[i], k) for i, k in zip(order, turn, strict=True)]).reshape(-1, 64)
    tensors = (torch.tensor(pictures, dtype=torch.float32), torch.tensor(digits.target[order]), torch.tensor(turn))
    return tuple(t[:1200] for t in tensors), tuple(t[1200:] for t in tensors)


def train(balancer: gb.Balancer, seed: int, epochs: int, only: str | None = None) -> dict[str, float]:
    """Train on all tasks with ``balancer`` (or on one alone) and return the held-out scores."""
    # Without a process group a single rank, which averages nothing. The losses are means: ranks need equal parts.
    ranks = gb.distributed.Ranks("average")
    if BATCH % ranks.size:
        raise SystemExit(f"The number of ranks must divide the batch of {BATCH}, found {ranks.size}.")
    torch.manual_seed(seed)
    training, held_out = data(seed)
    model = SharedTrunk()
    groups = [
        {"params": list(model.trunk.parameters())},
        {"params": list(model.heads.parameters()), "balanced": False},  # each head gets its own task's plain gradient
    ]
    optimizer = gb.BalancedOptimizer(torch.optim.Adam(groups, lr=2e-3), balancer, ranks=ranks)
    for _ in range(epochs):
        for batch in torch.randperm(1200).split(BATCH):
            own = batch.chunk(ranks.size)[ranks.rank]
            losses = model.losses(*(t[own] for t in training))
            optimizer.backward({only: losses[only]} if only else losses)
            optimizer.step()
            optimizer.zero_grad()
    return model.scores(*held_out)


def standard_errors(values: np.ndarray) -> np.ndarray:
    """Of the means over seeds; NaN where there is one seed."""
    many = len(values) > 1
    return values.std(0, ddof=1) / len(values) ** 0.5 if many else np.full(values.shape[1], np.nan)


def draw(results: dict[str, np.ndarray], alone: np.ndarray, path: Path) -> None:
    """One panel per task: a dot with standard error per method, a line for a model trained on that task alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(10, 2.6), sharey=True, constrained_layout=True)
    labels = {"digit": "digit (accuracy)", "turn": "turn (accuracy)", "picture": "picture (explained variance)"}
    for k, (axis, task) in enumerate(zip(axes, TASKS, strict=True)):
        axis.axvline(alone[:, k].mean(), color="0.6", linewidth=1, zorder=0)
        for row, values in enumerate(results.values()):
            axis.errorbar(
                values[:, k].mean(), row, xerr=standard_errors(values)[k], fmt="o", color=f"C{row}", capsize=3
            )
        axis.set_title(labels[task], fontsize=10, loc="left")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].set_yticks(range(len(results)), list(results))
    axes[0].set_ylim(len(results) - 0.5, -0.5)
    figure.suptitle("Held-out scores; grey line: a model trained on that task alone", fontsize=9, color="0.35")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/multitask"))
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # set by torchrun
        distributed.init_process_group("gloo")
    first = gb.distributed.Ranks("average").rank == 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    seeds = range(arguments.seeds)
    with tqdm(total=arguments.seeds * (len(METHODS) + len(TASKS)), desc="runs", disable=not first) as progress:

        def run(balancer: gb.Balancer, seed: int, only: str | None = None) -> list[float]:
            scores = train(balancer, seed, arguments.epochs, only)
            progress.update()
            return [scores[task] for task in TASKS]

        alone = np.array([[run(gb.Mean(), seed, task)[k] for k, task in enumerate(TASKS)] for seed in seeds])
        results = {name: np.array([run(make(), seed) for seed in seeds]) for name, make in METHODS.items()}

    if distributed.is_initialized():
        distributed.destroy_process_group()
    if not first:
        return
    print(f"{'':>10}" + "".join(f"{task:>18}" for task in TASKS) + f"{'mean change':>14}")
    for name, values in {"alone": alone, **results}.items():
        cells = [f"{m:.3f} +- {s:.3f}" for m, s in zip(values.mean(0), standard_errors(values), strict=True)]
        change = 100 * ((values - alone) / alone).mean()
        print(f"{name:>10}" + "".join(f"{cell:>18}" for cell in cells) + f"{change:>13.1f}%")
    draw(results, alone, arguments.output / "multitask.png")
    print(f"Picture: {arguments.output / 'multitask.png'}. Mean change: against models trained on one task alone.")


if __name__ == "__main__":
    main()
