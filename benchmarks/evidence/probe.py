"""What every method would do on the batches of a training run: one Gramian per optimizer step.

All that the experiments ask of gradients (cosines, coefficients, cached directions) are inner products of a few dozen
vectors that one recorded forward gives together. They are stored as one matrix per step; the rest is arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import gradbalance as gb
from gradbalance_diffusers.advantages import group_advantages
from gradbalance_diffusers.balance import weighted_sum
from gradbalance_diffusers.nft import optimality
from gradbalance_diffusers.trainer import EpochData, NFTTrainer

# What "the first micro-batch" is, as a share of the samples of an optimizer step at one noise level.
FIRST = 1 / 8


class ProbedTrainer(NFTTrainer):
    """The trainer, taking the Gramian of :func:`rows_of` before each of its optimizer steps.

    Attributes:
        records: Per optimizer step ``{"epoch", "position", "labels", "gram"}``; ``position`` counts the steps of an
            epoch from 0, the first after the old policy was moved.
    """

    records: list[dict[str, Any]]

    def _optimizer_step(self, data: EpochData, samples: Tensor, epoch: int) -> None:
        if not hasattr(self, "records"):
            self.records = []
        position = sum(record["epoch"] == epoch for record in self.records)
        labels, gram = self.probe(data, samples)
        self.records.append({"epoch": epoch, "position": position, "labels": labels, "gram": gram.tolist()})
        super()._optimizer_step(data, samples, epoch)

    def probe(self, data: EpochData, samples: Tensor) -> tuple[list[str], Tensor]:
        """Labels of R vectors and their Gramian ``[R, R]`` float64, at the present weights."""
        seen: list[Tensor] = []

        def look(gram: Tensor) -> Tensor:
            seen.append(gram)
            return torch.zeros(len(gram), dtype=gram.dtype)

        optimizer = gb.BalancedOptimizer(
            torch.optim.SGD(self.policy.parameters.values(), lr=0.0), look, module=self.policy.transformer
        )
        labels: list[str] = []
        for level in range(data.draws.sigma.shape[1]):
            positive, negative, _ = self._terms(data, samples, level)
            labels, coefficients = rows_of(
                data,
                samples,
                level,
                advantage_clip=self.config.loss.advantage_clip,
                images_per_prompt=self.config.prompts.images_per_prompt,
            )
            optimizer.backward(gb.AffineLoss(torch.stack([positive, negative]), coefficients, labels))
        optimizer.balance()
        optimizer.zero_grad()
        return labels, seen[0]


def rows_of(
    data: EpochData, samples: Tensor, level: int, *, advantage_clip: float, images_per_prompt: int
) -> tuple[list[str], Tensor]:
    r"""Coefficients ``[R, 2, b]`` of (L+, L-) of ``samples`` at one noise level, for all vectors of interest.

    With r the optimality of a reward and m its mask, n its count of (sample, level) pairs in the step:

    * ``full:k``: :math:`(m r / n, m (1 - r) / n)`, the loss of reward k.
    * ``centered:k``: :math:`(m (r - 1/2) / n, -m (r - 1/2) / n)`, the same without the part all rewards share.
    * ``zero:k``: missing rewards as advantage 0 (r = 1/2), mean over all samples, as published on cached steps.
    * ``first:k``: ``centered:k`` of the first micro-batch only.
    * ``sum``, ``centered:sum``: the same two for the advantage of the summed reward.
    * ``common``: :math:`(1/2, 1/2)` over all pairs.
    """
    levels = data.draws.sigma.shape[1]
    mask = data.advantages.mask[samples].double()
    r = data.r[samples].double()
    counts = (mask.sum(0) * levels).clamp(min=1)
    pairs = len(samples) * levels
    share = mask / counts
    summed, present = weighted_sum(data.rollout.rewards, {})
    groups = torch.arange(len(data.r)) // images_per_prompt
    r_sum = optimality(group_advantages(summed, present, groups).values, advantage_clip)[samples, 0].double()
    first = torch.zeros(len(samples), dtype=torch.float64)
    if level == 0:
        first[: max(1, round(FIRST * len(samples)))] = 1.0
    vectors: dict[str, tuple[Tensor, Tensor]] = {}
    for k, name in enumerate(data.names):
        centered = share[:, k] * (r[:, k] - 0.5)
        vectors[f"full:{name}"] = (share[:, k] * r[:, k], share[:, k] * (1 - r[:, k]))
        vectors[f"centered:{name}"] = (centered, -centered)
        known = torch.where(mask[:, k] > 0, r[:, k], 0.5)
        vectors[f"zero:{name}"] = (known / pairs, (1 - known) / pairs)
        vectors[f"first:{name}"] = (first * centered, -first * centered)
    vectors["sum"] = (r_sum / pairs, (1 - r_sum) / pairs)
    vectors["centered:sum"] = ((r_sum - 0.5) / pairs, -(r_sum - 0.5) / pairs)
    half = torch.full((len(samples),), 0.5 / pairs, dtype=torch.float64)
    vectors["common"] = (half, half)
    return list(vectors), torch.stack([torch.stack(pair) for pair in vectors.values()])


def pick(record: dict[str, Any], prefix: str, names: Sequence[str]) -> list[int]:
    """Places of ``prefix:name`` for all names."""
    return [record["labels"].index(f"{prefix}:{name}") for name in names]
