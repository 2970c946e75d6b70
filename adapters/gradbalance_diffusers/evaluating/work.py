"""What there is to generate and score, in batches whose composition never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradbalance.errors import InvalidArgumentError


@dataclass(frozen=True)
class Picture:
    """One picture of an evaluation.

    Attributes:
        prompt: Index of its prompt.
        sample: Which of the pictures of this prompt, counted from 0.
    """

    prompt: int
    sample: int

    @property
    def file_name(self) -> str:
        """Name of its file.

        >>> Picture(prompt=7, sample=1).file_name
        '000007-1.png'
        """
        return f"{self.prompt:06d}-{self.sample}.png"

    def seed(self, first: int, prompts: int) -> int:
        """Seed of its noise: all pictures of an evaluation have distinct ones, and sample 0 those of a training run.

        Args:
            first: Seed of prompt 0, sample 0.
            prompts: Number of prompts.

        >>> [Picture(prompt, sample).seed(100, prompts=2) for sample in (0, 1) for prompt in (0, 1)]
        [100, 101, 102, 103]
        """
        return first + self.prompt + self.sample * prompts


def batches(prompts: int, samples: int, batch_size: int) -> list[list[Picture]]:
    """All pictures, ``batch_size`` at a time; sample by sample, and within one in the order of the prompts.

    A batch is the unit of work. Which pictures share a batch changes their last bits, because matrix products round
    differently; since the batches depend on the three numbers only, an interrupted evaluation that goes on, one with
    more samples, and one whose batches are dealt out between processes give the same files.

    >>> [[(p.prompt, p.sample) for p in batch] for batch in batches(prompts=3, samples=2, batch_size=2)]
    [[(0, 0), (1, 0)], [(2, 0)], [(0, 1), (1, 1)], [(2, 1)]]
    """
    if min(prompts, samples, batch_size) < 1:
        raise InvalidArgumentError(
            f"`prompts`, `samples` and `batch_size` must be at least 1. Found {prompts}, {samples} and {batch_size}."
        )
    starts = range(0, prompts, batch_size)
    return [
        [Picture(prompt, sample) for prompt in range(start, min(start + batch_size, prompts))]
        for sample in range(samples)
        for start in starts
    ]


def missing(work: Sequence[Sequence[Picture]], done: set[Picture]) -> list[list[Picture]]:
    """The batches with at least one picture that is not done, whole: their composition stays what it is."""
    return [list(batch) for batch in work if not done.issuperset(batch)]
