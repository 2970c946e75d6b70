"""Small supervised multi-task problems on real data that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

Batch = tuple[Tensor, ...]


class SharedTrunk(nn.Module):
    """A trunk that all tasks share, and one linear head per task."""

    def __init__(self, trunk: nn.Module, width: int, outputs: dict[str, int]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict({name: nn.Linear(width, size) for name, size in outputs.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The output of every head."""
        features = self.trunk(x)
        return {name: head(features) for name, head in self.heads.items()}


@dataclass(frozen=True)
class Problem:
    """A multi-task problem.

    Attributes:
        title: For readers.
        tasks: Names.
        larger_is_better: Whether ``scores`` are to be raised (accuracy) or lowered (error), for every task alike.
        split: Seed -> training and held-out tensors, the input first and one target per task after it.
        model: Makes a fresh model.
        losses: Outputs and targets -> one loss per task.
        scores: The same on held-out data, for reading.
        epochs: Of training.
        batch_size: Of training.
    """

    title: str
    tasks: tuple[str, ...]
    larger_is_better: bool
    split: Callable[[int], tuple[Batch, Batch]]
    model: Callable[[], SharedTrunk]
    losses: Callable[[dict[str, Tensor], Batch], dict[str, Tensor]]
    scores: Callable[[dict[str, Tensor], Batch], dict[str, float]]
    epochs: int
    batch_size: int


def two_digits() -> Problem:
    """Two handwritten digits on one 12 x 12 canvas, overlapping: which is at the top left, which at the bottom right?

    The construction of MultiMNIST (Sabour et al. 2017; Sener and Koltun 2018) with scikit-learn's 8 x 8 digits. Pairs
    of the held-out part are made of digits that training never saw.
    """
    tasks = ("top left", "bottom right")

    def pairs(images: np.ndarray, labels: np.ndarray, count: int, rng: np.random.Generator) -> Batch:
        first, second = rng.integers(0, len(images), (2, count))
        canvas = np.zeros((count, 1, 12, 12), dtype=np.float32)
        canvas[:, 0, :8, :8] = images[first]
        canvas[:, 0, 4:, 4:] = np.maximum(canvas[:, 0, 4:, 4:], images[second])
        return torch.tensor(canvas / 16), torch.tensor(labels[first]), torch.tensor(labels[second])

    def split(seed: int) -> tuple[Batch, Batch]:
        rng = np.random.default_rng(seed)
        digits = load_digits()
        order = rng.permutation(len(digits.images))
        images, labels = digits.images[order], digits.target[order]
        return pairs(images[:1200], labels[:1200], 6000, rng), pairs(images[1200:], labels[1200:], 2000, rng)

    def model() -> SharedTrunk:
        trunk = nn.Sequential(
            nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(24 * 16, 48), nn.ReLU(),
        )  # fmt: skip
        return SharedTrunk(trunk, 48, dict.fromkeys(tasks, 10))

    return Problem(
        title="two overlapping digits (accuracy)",
        tasks=tasks,
        larger_is_better=True,
        split=split,
        model=model,
        losses=lambda outputs, targets: {
            name: cross_entropy(outputs[name], target) for name, target in zip(tasks, targets, strict=True)
        },
        scores=lambda outputs, targets: {
            name: float((outputs[name].argmax(1) == target).float().mean())
            for name, target in zip(tasks, targets, strict=True)
        },
        epochs=12,
        batch_size=100,
    )


def diabetes(*, standardized: bool) -> Problem:
    """Six blood values and the progression of the disease from age, sex, body-mass index and blood pressure.

    scikit-learn's diabetes data (Efron et al. 2004; 442 patients). The score of a task is its held-out squared error
    over the variance of its target.

    Args:
        standardized: Losses of targets with unit variance, which someone has to think of; otherwise in the units of the
            file, whose variances span four orders of magnitude.
    """
    names = ("tc", "ldl", "hdl", "tch", "ltg", "glu", "progression")

    def split(seed: int) -> tuple[Batch, Batch]:
        table = load_diabetes(scaled=False)
        order = np.random.default_rng(seed).permutation(len(table.data))
        inputs, outputs = table.data[order, :4], np.column_stack([table.data[order, 4:], table.target[order]])
        mean, deviation = inputs[:300].mean(0), inputs[:300].std(0)
        x = torch.tensor((inputs - mean) / deviation, dtype=torch.float32)
        # Centered in any case: an offset is not what the tasks are about.
        centered = outputs - outputs[:300].mean(0)
        y = torch.tensor(centered / (outputs[:300].std(0) if standardized else 1.0), dtype=torch.float32)
        parts = [(x[rows], *y[rows].unbind(1)) for rows in (slice(300), slice(300, None))]
        return parts[0], parts[1]

    def model() -> SharedTrunk:
        trunk = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
        return SharedTrunk(trunk, 8, dict.fromkeys(names, 1))

    return Problem(
        title=f"diabetes, {'standardized targets' if standardized else 'targets in their units'} (relative error)",
        tasks=names,
        larger_is_better=False,
        split=split,
        model=model,
        losses=lambda outputs, targets: {
            name: mse_loss(outputs[name].squeeze(1), target) for name, target in zip(names, targets, strict=True)
        },
        scores=lambda outputs, targets: {
            name: float(mse_loss(outputs[name].squeeze(1), target) / target.var(correction=0))
            for name, target in zip(names, targets, strict=True)
        },
        epochs=400,
        batch_size=100,
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "two-digits": two_digits,
    "diabetes-standardized": lambda: diabetes(standardized=True),
    "diabetes-units": lambda: diabetes(standardized=False),
}
