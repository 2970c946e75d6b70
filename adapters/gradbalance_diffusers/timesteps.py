"""At which noise levels, and with which noise, each sample is trained."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError

if TYPE_CHECKING:
    from .policy import SD3Policy


@dataclass(frozen=True)
class NoiseDraws:
    """Noise levels of B samples, and the noise of any of them when it is asked for.

    Kept for all samples of an SD3.5 epoch, the noise would be 7 GB (1152 samples x 24 levels x 16 x 64 x 64 numbers).
    The noise of a sample at a level is a pure function of (``seed``, ``rows[sample]``, level): it does not depend on
    how samples are split into batches, or over processes.

    Attributes:
        sigma: Levels ``[B, T]``, float32 on the CPU.
        rows: ``[B]`` int64; samples with the same row share their levels and their noise.
        seed: Numbers that set these draws apart from others, such as (seed of the run, epoch).
    """

    sigma: Tensor
    rows: Tensor
    seed: tuple[int, ...]

    def index(self, idx: Tensor) -> NoiseDraws:
        """The levels of the samples ``idx``, with the same noise."""
        return replace(self, sigma=self.sigma[idx], rows=self.rows[idx])

    def noise(self, samples: Tensor, level: int, latent_shape: Sequence[int]) -> Tensor:
        """Standard normal noise ``[b, C, h, w]``, float32 on the CPU, of ``samples [b]`` at ``sigma[samples, level]``.

        >>> draws = NoiseDraws(torch.rand(3, 2), torch.tensor([0, 1, 0]), (7, 0))
        >>> noise = draws.noise(torch.tensor([2, 1, 0]), 1, (4, 2, 2))
        >>> torch.equal(noise[0], noise[2]), torch.equal(noise[1:2], draws.noise(torch.tensor([1]), 1, (4, 2, 2)))
        (True, True)
        """
        distinct, place = self.rows[samples].unique(return_inverse=True)
        drawn = [
            torch.randn(*latent_shape, generator=seeded_generator(*self.seed, 1, row, level))
            for row in distinct.tolist()
        ]
        return torch.stack(drawn)[place]


def seeded_generator(seed: int, *key: int) -> torch.Generator:
    """A CPU generator, a pure function of non-negative integers; close ones and longer keys give unlike streams."""
    (word,) = np.random.SeedSequence(seed, spawn_key=key).generate_state(1)
    return torch.Generator().manual_seed(int(word))


class TimestepSampler:
    r"""Draws noise levels and noise for training.

    ``mode="grid"``: levels of the sampling grid. Each image gets its own random permutation of the n levels within
    [low, high]; the first int(n · fraction), at least one, can be trained on, and ``per_image`` of them are. With
    fraction 0.99, as DiffusionNFT has it, and all of them trained, each image leaves out one level at random.

    ``mode="continuous"``: :math:`\sigma = \mathrm{shift} \cdot u / (1 + (\mathrm{shift} - 1) u)` with u uniform on what
    maps to (low, high]: the density that the grid has in the limit of many steps.

    ``share_in_group``: all images of a prompt group get the same levels **and** the same noise (common random
    numbers). The gradient stays unbiased; the noise that is common to the images of a group cancels where their
    advantages, which sum to zero, are differenced.

    Args:
        sigmas: Levels of the sampling grid without the final 0, ``[n]`` in (0, 1].
        per_image: Levels per image, T. None: all that can be trained on (``mode="grid"`` only).
        fraction: In (0, 1], for ``mode="grid"``.
        low: Lowest level.
        high: Highest level.
        share_in_group: Common random numbers within a prompt group.
        mode: ``"grid"`` or ``"continuous"``.
        shift: Shift of the scheduler, for ``mode="continuous"``; 1 makes sigma itself uniform.

    Raises:
        InvalidArgumentError: A number out of its range, or more levels per image than there are.

    >>> sampler = TimestepSampler([1.0, 0.9, 0.7, 0.3], per_image=2, low=0.5)
    >>> draws = sampler.draw(["a", "a", "b"], seed=(0, 7))
    >>> draws.sigma.shape, bool((draws.sigma >= 0.5).all())
    (torch.Size([3, 2]), True)
    """

    def __init__(
        self,
        sigmas: Tensor | Sequence[float],
        *,
        per_image: int | None,
        fraction: float = 0.99,
        low: float = 0.0,
        high: float = 1.0,
        share_in_group: bool = False,
        mode: Literal["grid", "continuous"] = "grid",
        shift: float = 1.0,
    ) -> None:
        grid = torch.as_tensor(sigmas, dtype=torch.float32).flatten()
        if not len(grid) or not bool(((grid > 0) & (grid <= 1)).all()):
            raise InvalidArgumentError(
                f"`sigmas` must be levels in (0, 1], without the final 0. Found {grid.tolist()}."
            )
        if not 0.0 <= low < high <= 1.0:
            raise InvalidArgumentError(f"`low` and `high` must satisfy 0 <= low < high <= 1. Found {low} and {high}.")
        if not 0.0 < fraction <= 1.0:
            raise InvalidArgumentError(f"`fraction` must be in (0, 1]. Found {fraction}.")
        if mode not in ("grid", "continuous"):
            raise InvalidArgumentError(f"`mode` must be 'grid' or 'continuous'. Found {mode!r}.")
        if not shift > 0:
            raise InvalidArgumentError(f"`shift` must be positive. Found {shift}.")
        self.mode, self.low, self.high, self.shift, self.share_in_group = mode, low, high, shift, share_in_group
        self.levels = grid[(grid >= low) & (grid <= high)]
        if mode == "grid":
            if not len(self.levels):
                raise InvalidArgumentError(
                    f"At least one of `sigmas` must lie in [{low}, {high}]. Found {grid.tolist()}. Widen the range."
                )
            available = max(1, int(len(self.levels) * fraction))
            per_image = available if per_image is None else per_image
            if per_image > available:
                raise InvalidArgumentError(
                    f"`per_image` must be at most int(n * fraction) = {available}, for the n = {len(self.levels)} "
                    f"sampling levels in [{low}, {high}] and fraction {fraction}. Found {per_image}. "
                    "Sample with more steps, widen the range, or take mode='continuous'."
                )
        if per_image is None or per_image < 1:
            raise InvalidArgumentError(f"`per_image` must be at least 1 in mode {mode!r}. Found {per_image}.")
        self.per_image = per_image

    @classmethod
    def from_config(cls, policy: SD3Policy, config: Any, steps: int) -> TimestepSampler:
        """On the policy's own grid of ``steps`` steps; ``config`` has the keyword arguments as attributes."""
        return cls(policy.noise_levels(steps)[:-1], shift=policy.pipeline.scheduler.config.shift, **vars(config))

    def draw(self, groups: Tensor | Sequence[Hashable], seed: Sequence[int]) -> NoiseDraws:
        """Noise levels and noise of B images.

        Args:
            groups: B prompt-group ids; they matter only with ``share_in_group``.
            seed: The only source of randomness, non-negative integers such as (seed of the run, epoch).
        """
        ids: list[Hashable] = groups.tolist() if isinstance(groups, Tensor) else list(groups)
        if self.share_in_group:
            order = {group: i for i, group in enumerate(dict.fromkeys(ids))}
            rows = torch.tensor([order[group] for group in ids], dtype=torch.int64)
            number = len(order)
        else:
            rows, number = torch.arange(len(ids)), len(ids)
        generator = seeded_generator(*seed, 0)
        sigma = self._grid(number, generator) if self.mode == "grid" else self._continuous(number, generator)
        return NoiseDraws(sigma[rows], rows, tuple(seed))

    def _grid(self, number: int, generator: torch.Generator) -> Tensor:
        scores = torch.rand(number, len(self.levels), generator=generator, dtype=torch.float64)
        return self.levels[scores.argsort(dim=1, stable=True)[:, : self.per_image]]

    def _continuous(self, number: int, generator: torch.Generator) -> Tensor:
        lowest, highest = (s / (self.shift - (self.shift - 1) * s) for s in (self.low, self.high))
        uniform = 1.0 - torch.rand(number, self.per_image, generator=generator, dtype=torch.float64)  # in (0, 1]
        u = lowest + (highest - lowest) * uniform
        return (self.shift * u / (1 + (self.shift - 1) * u)).to(torch.float32).clamp(self.low, self.high)
