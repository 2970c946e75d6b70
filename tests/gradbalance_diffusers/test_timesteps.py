from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.timesteps import NoiseDraws, TimestepSampler

GRID = [1.0, 0.96, 0.9, 0.8, 0.6, 0.3, 0.01]
SHAPE = (4, 2, 2)


def draw(images: int = 500, groups: Any = None, seed: int = 0, **options: Any) -> NoiseDraws:
    sampler = TimestepSampler(GRID, **({"per_image": None} | options))
    return sampler.draw(list(range(images)) if groups is None else groups, (seed, 0))


def noise_of(draws: NoiseDraws) -> Tensor:
    """``[B, T, C, h, w]``."""
    samples, levels = torch.arange(len(draws.rows)), range(draws.sigma.shape[1])
    return torch.stack([draws.noise(samples, level, SHAPE) for level in levels], dim=1)


def test_each_image_leaves_out_one_level_at_random() -> None:
    sigma = draw().sigma
    assert sigma.shape == (500, 6)
    grid = set(torch.tensor(GRID).tolist())
    left_out = [grid - set(row) for row in sigma.tolist()]
    assert all(len(row) == 1 for row in left_out)
    counts = {level: sum(level in row for row in left_out) for level in grid}
    assert min(counts.values()) > 500 / 7 / 2


def test_permutations_differ_between_images_and_positions_are_uniform() -> None:
    sigma = draw(2000, per_image=1).sigma
    values, counts = sigma.unique(return_counts=True)
    assert len(values) == 7
    assert int(counts.min()) > 2000 / 7 * 0.75


def test_range_and_fraction() -> None:
    sigma = draw(low=0.75, high=0.97, fraction=1.0).sigma
    assert sigma.shape == (500, 3)
    assert all(set(row) == set(torch.tensor([0.96, 0.9, 0.8]).tolist()) for row in sigma.tolist())


def test_a_single_level_is_kept() -> None:
    sigma = draw(low=0.99).sigma
    assert sigma.shape == (500, 1)
    assert bool((sigma == 1.0).all())


def test_draws_are_a_function_of_the_seed() -> None:
    first, again, other = draw(20, seed=3), draw(20, seed=3), draw(20, seed=4)
    assert torch.equal(first.sigma, again.sigma)
    assert torch.equal(noise_of(first), noise_of(again))
    assert not torch.equal(first.sigma, other.sigma)
    assert not torch.equal(noise_of(first), noise_of(other))


@given(st.permutations(range(8)), st.lists(st.integers(0, 8), max_size=4))
def test_noise_of_a_sample_does_not_depend_on_the_batch_it_is_in(order: list[int], cuts: list[int]) -> None:
    """However the samples are dealt out to micro-batches or processes, each gets the same noise."""
    draws = draw(groups=["a", "a", "b", "b"] * 2, per_image=2, share_in_group=len(cuts) % 2 == 0)
    whole = noise_of(draws)
    for start, end in pairwise([0, *sorted(cuts), 8]):
        part = torch.tensor(order[start:end], dtype=torch.int64)
        if len(part):
            assert torch.equal(draws.noise(part, 1, SHAPE), whole[part, 1])


def test_noise_differs_between_samples_levels_epochs_and_seeds() -> None:
    sampler = TimestepSampler(GRID, per_image=2)
    seen = [noise_of(sampler.draw(range(3), (seed, epoch))) for seed in range(2) for epoch in range(2)]
    distinct = {tuple(noise.flatten().tolist()) for draws in seen for sample in draws for noise in sample}
    assert len(distinct) == 2 * 2 * 3 * 2


def test_nothing_grows_with_the_size_of_a_latent() -> None:
    draws = TimestepSampler(GRID, per_image=2).draw(range(1000), (0,))
    assert sum(x.nbytes for x in vars(draws).values() if isinstance(x, Tensor)) == 1000 * (2 * 4 + 8)


def test_global_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    noise_of(draw(5))
    draw(mode="continuous", per_image=2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["grid", "continuous"])
def test_common_random_numbers(mode: Any) -> None:
    groups = torch.tensor([4, 9, 4, 9, 4])
    draws = draw(groups=groups, per_image=2, share_in_group=True, mode=mode)
    sigma, noise = draws.sigma, noise_of(draws)
    for group in (4, 9):
        members = (groups == group).nonzero().flatten()
        assert bool((sigma[members] == sigma[members[0]]).all())
        assert bool((noise[members] == noise[members[0]]).all())
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0, 0], noise[0, 1])


def test_without_sharing_images_of_a_group_differ() -> None:
    draws = draw(groups=["a"] * 20, per_image=2)
    assert len({tuple(row) for row in draws.sigma.tolist()}) > 5
    noise = noise_of(draws)
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_continuous_levels_follow_the_shifted_uniform_density(shift: float) -> None:
    sampler = TimestepSampler(GRID, per_image=2, mode="continuous", low=0.5, high=0.9, shift=shift)
    flat = sampler.draw(range(20_000), (0,)).sigma.flatten().double().sort().values
    assert 0.5 <= float(flat.min()) < float(flat.max()) <= 0.9

    def unshift(s: Tensor | float) -> Any:
        return s / (shift - (shift - 1) * s)

    uniform = (unshift(flat) - unshift(0.5)) / (unshift(0.9) - unshift(0.5))
    # Kolmogorov-Smirnov distance; 40,000 draws exceed 0.0098 with probability 0.001, and the seed is fixed.
    assert float((uniform - (torch.arange(40_000) + 0.5) / 40_000).abs().max()) < 0.0098


def test_continuous_never_draws_zero() -> None:
    sigma = TimestepSampler(GRID, per_image=4, mode="continuous").draw(range(5000), (0,)).sigma
    assert float(sigma.min()) > 0


def test_noise_is_standard_normal() -> None:
    noise = noise_of(draw(per_image=2))
    assert noise.dtype == torch.float32
    assert float(noise.mean()) == pytest.approx(0, abs=0.03)
    assert float(noise.std()) == pytest.approx(1, abs=0.03)


def test_from_config_uses_the_sampling_grid(load_policy: Callable[..., SD3Policy]) -> None:
    policy = load_policy()
    config = SimpleNamespace(mode="grid", per_image=None, fraction=1.0, low=0.0, high=1.0, share_in_group=False)
    sampler = TimestepSampler.from_config(policy, config, 10)
    policy.pipeline.scheduler.set_timesteps(10)
    assert torch.equal(sampler.levels, policy.pipeline.scheduler.sigmas[:-1])
    assert sampler.shift == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_image": 7}, r"int\(n \* fraction\) = 6"),
        ({"per_image": 0}, "per_image"),
        ({"per_image": None, "mode": "continuous"}, "per_image"),
        ({"low": 0.5, "high": 0.5}, "low"),
        ({"low": 0.97, "high": 0.99}, "Widen"),
        ({"high": 1.5}, "high"),
        ({"fraction": 0.0}, "fraction"),
        ({"mode": "random"}, "mode"),
        ({"shift": 0.0}, "shift"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        draw(**options)


@pytest.mark.parametrize("sigmas", [[], [1.0, 0.0], [1.2]])
def test_bad_levels(sigmas: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="sigmas"):
        TimestepSampler(sigmas, per_image=1)
