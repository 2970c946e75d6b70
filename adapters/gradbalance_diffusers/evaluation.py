"""Score the policy on fixed prompts and seeds, and compare with an earlier score of the same prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import gradbalance as gb
from gradbalance import InvalidArgumentError

from .config import EvaluationConfig, SamplingConfig
from .embeddings import PromptEncoder
from .policy import SD3Policy
from .prompts import Prompt
from .rewards.base import RewardSet
from .rollout import roll_out
from .share import Share


def mean_and_error(values: Tensor) -> dict[str, float | int | None]:
    """Mean, standard error of the mean (sample standard deviation over the root of n) and n of a 1-D tensor.

    >>> mean_and_error(torch.tensor([1.0, 2.0, 3.0]))["mean"]
    2.0
    """
    n = int(values.numel())
    return {
        "mean": float(values.mean()) if n else None,
        "se": float(values.std(unbiased=True)) / math.sqrt(n) if n > 1 else None,
        "n": n,
    }


@dataclass(frozen=True)
class Evaluation:
    """Scores of one picture per prompt.

    Attributes:
        epoch: Epochs trained before it.
        names: Reward names, length K.
        prompts: The N prompts.
        values: ``[N, K]`` float64, NaN where a reward does not apply.
        mask: ``[N, K]`` bool.
        images: Some of the pictures by the number of their prompt, ``[3, H, W]`` in [0, 1].
    """

    epoch: int
    names: tuple[str, ...]
    prompts: list[Prompt]
    values: Tensor
    mask: Tensor
    images: Mapping[int, Tensor] = field(default_factory=dict)

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """Mean and standard error over the prompts that each reward applies to."""
        return {name: mean_and_error(self.values[self.mask[:, k], k]) for k, name in enumerate(self.names)}

    def change_from(self, base: Evaluation) -> dict[str, dict[str, float | int | None]]:
        """Paired change against ``base``: the same prompts and seeds, so only the policy differs.

        The standard error is that of the mean of the N differences, far smaller than that of a difference of two means.
        """
        if [p.text for p in base.prompts] != [p.text for p in self.prompts] or base.names != self.names:
            raise InvalidArgumentError(
                "`base` must hold the same prompts and rewards. Evaluate both with the same configuration."
            )
        both = self.mask & base.mask
        return {name: mean_and_error((self.values - base.values)[both[:, k], k]) for k, name in enumerate(self.names)}

    def as_json(self, grid: Sequence[int]) -> dict[str, Any]:
        """The scores of every prompt, as plain values."""
        return {
            "epoch": self.epoch,
            "prompts": [
                {
                    "prompt": prompt.text,
                    "source": prompt.source,
                    "scores": {
                        name: float(self.values[i, k]) if self.mask[i, k] else None for k, name in enumerate(self.names)
                    },
                }
                for i, prompt in enumerate(self.prompts)
            ],
            "grid": list(grid),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Evaluation:
        """Scores (without pictures) back from :meth:`as_json`."""
        rows = record["prompts"]
        names = tuple(rows[0]["scores"])
        values = torch.tensor(
            [[math.nan if row["scores"][n] is None else row["scores"][n] for n in names] for row in rows],
            dtype=torch.float64,
        )
        prompts = [Prompt(text=row["prompt"], source=row["source"], metadata={}) for row in rows]
        return cls(epoch=record["epoch"], names=names, prompts=prompts, values=values, mask=~values.isnan())


def evaluate(
    policy: SD3Policy,
    encoder: PromptEncoder,
    rewards: RewardSet,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    sampling: SamplingConfig,
    *,
    size: tuple[int, int],
    epoch: int,
    ranks: gb.distributed.Ranks | None = None,
) -> Evaluation:
    """One picture per prompt by the default policy; picture i always has seed ``config.seed + i``.

    Ranks (None for all there are) make and score a part each, and all get the result, with the pictures of the first
    ``config.saved_images`` prompts of each source.
    """
    share = Share(torch.arange(len(prompts)), ranks or gb.distributed.Ranks("average"))
    own = share.own.tolist()
    scores, pictures = None, torch.empty(0, 3, *size)
    shown = first_of_each_source(prompts, config.saved_images)
    if own:  # there may be fewer prompts than ranks
        with policy.role("default"):
            rollout = roll_out(
                policy,
                encoder,
                rewards,
                [prompts[i] for i in own],
                [config.seed + i for i in own],
                replace(sampling, steps=config.steps, solver=config.solver),
                size=size,
                keep_images=True,
                description="evaluation",
            )
        assert rollout.images is not None
        scores = rollout.rewards
        pictures = rollout.images[[place for place, i in enumerate(own) if i in shown]]
    table = share.gather_table(scores, rewards.names)
    images = dict(zip(shown, share.gather(pictures, torch.tensor(shown, dtype=torch.int64)), strict=True))
    return Evaluation(epoch, tuple(table.names), list(prompts), table.values, table.mask, images)


def first_of_each_source(prompts: Sequence[Prompt], number: int) -> list[int]:
    """Places of the first ``number`` prompts of each source, ascending.

    >>> first_of_each_source([Prompt("a", "ocr"), Prompt("b", "ocr"), Prompt("c", "general")], 1)
    [0, 2]
    """
    seen: Counter[str] = Counter()
    places = []
    for place, prompt in enumerate(prompts):
        seen[prompt.source] += 1
        if seen[prompt.source] <= number:
            places.append(place)
    return places
