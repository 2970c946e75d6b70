"""Which prompts an epoch trains on: a fixed share of every source, drawn afresh by seed and epoch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradbalance.errors import InvalidArgumentError

if TYPE_CHECKING:
    from .prompts import Prompt


class StratifiedSampler:
    """Draws the prompt groups of an epoch; a pure function of (seed, epoch), so there is no state to save.

    Each source gets its share of ``groups_per_epoch`` by the largest remainder. Within an epoch the prompts of a source
    are distinct texts, unless it has fewer than it needs: then each is used equally often, give or take one. Sources
    are interleaved, so any stretch of an epoch has about the mix of the whole.

    Args:
        prompts: Prompts per source. A text that stands there several times counts once.
        mix: Share of each source, any positive numbers. Sources outside the mix are not drawn.
        groups_per_epoch: Prompts per epoch.
        images_per_prompt: Samples per prompt.
        seed: Seed of the run.

    Raises:
        InvalidArgumentError: A source of the mix without prompts, or one whose share rounds to no group at all.

    >>> from gradbalance_diffusers.prompts import Prompt
    >>> prompts = {s: [Prompt(f"{s} {i}", s) for i in range(9)] for s in ("ocr", "general")}
    >>> sampler = StratifiedSampler(prompts, {"ocr": 3, "general": 1}, 4, 2, seed=0)
    >>> sampler.source_counts
    {'ocr': 3, 'general': 1}
    >>> [prompt.source for prompt in sampler.samples(epoch=0)]
    ['ocr', 'ocr', 'general', 'general', 'ocr', 'ocr', 'ocr', 'ocr']
    """

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        mix: Mapping[str, float],
        groups_per_epoch: int,
        images_per_prompt: int,
        seed: int,
    ) -> None:
        empty = sorted(source for source in mix if not prompts.get(source))
        if empty or not mix:
            raise InvalidArgumentError(
                f"`mix` must name sources that have prompts ({', '.join(sorted(prompts))}). "
                f"Found {empty or 'an empty mix'}."
            )
        self.prompts = {source: _first_of_each_text(prompts[source]) for source in mix}
        self.groups_per_epoch, self.images_per_prompt, self.seed = groups_per_epoch, images_per_prompt, seed
        self.source_counts = apportion(mix, groups_per_epoch)
        starved = [source for source, count in self.source_counts.items() if count == 0]
        if starved:
            raise InvalidArgumentError(
                f"`mix` gives {starved} no prompt at all of the {groups_per_epoch} of an epoch. Found {dict(mix)}. "
                "Raise `groups_per_epoch` or their share, or leave them out."
            )

    def epoch(self, epoch: int) -> list[Prompt]:
        """The prompts of an epoch, one per group; length ``groups_per_epoch``."""
        placed: list[tuple[float, str, Prompt]] = []
        for source, count in self.source_counts.items():
            # A generator per source, so adding a source does not change what the others draw.
            rng = np.random.default_rng([self.seed, epoch, zlib.crc32(source.encode())])
            pool, chosen = self.prompts[source], list[int]()
            while len(chosen) < count:
                chosen += rng.permutation(len(pool))[: count - len(chosen)].tolist()
            placed += [((i + 0.5) / count, source, pool[index]) for i, index in enumerate(chosen)]
        return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]

    def samples(self, epoch: int) -> list[Prompt]:
        """:meth:`epoch` with every prompt ``images_per_prompt`` times in a row; sample i is of group i // that."""
        return [prompt for prompt in self.epoch(epoch) for _ in range(self.images_per_prompt)]


def apportion(mix: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers in the ratio of ``mix`` that add up to ``total``, by the largest remainder; ties go to the first.

    >>> apportion({"ocr": 3, "geneval": 4, "general": 1}, 10)
    {'ocr': 4, 'geneval': 5, 'general': 1}
    """
    whole = sum(mix.values())
    exact = {source: total * share / whole for source, share in mix.items()}
    counts = {source: int(value) for source, value in exact.items()}
    largest = sorted(mix, key=lambda source: counts[source] - exact[source])
    for source in largest[: total - sum(counts.values())]:
        counts[source] += 1
    return counts


def _first_of_each_text(prompts: Sequence[Prompt]) -> list[Prompt]:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    return list(first.values())
