from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.timesteps import TimestepSampler

GRID = [1.0, 0.96, 0.9, 0.8, 0.6, 0.3, 0.01]
SHAPE = (4, 2, 2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(images: int = 500, groups: Any = None, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    sampler = TimestepSampler(GRID, **({"per_image": None} | options))
    return sampler.draw(list(range(images)) if groups is None else groups, SHAPE, generator(seed))


def test_each_image_leaves_out_one_level_at_random() -> None:
    sigma, noise = draw()
    assert sigma.shape == (500, 6)
    assert noise.shape == (500, 6, *SHAPE)
    grid = set(torch.tensor(GRID).tolist())
    left_out = [grid - set(row) for row in sigma.tolist()]
    assert all(len(row) == 1 for row in left_out)
    counts = {level: sum(level in row for row in left_out) for level in grid}
    assert min(counts.values()) > 500 / 7 / 2


def test_permutations_differ_between_images_and_positions_are_uniform() -> None:
    sigma, _ = draw(2000, per_image=1)
    values, counts = sigma.unique(return_counts=True)
    assert len(values) == 7
    assert int(counts.min()) > 2000 / 7 * 0.75


def test_range_and_fraction() -> None:
    sigma, _ = draw(low=0.75, high=0.97, fraction=1.0)
    assert sigma.shape == (500, 3)
    assert all(set(row) == set(torch.tensor([0.96, 0.9, 0.8]).tolist()) for row in sigma.tolist())


def test_a_single_level_is_kept() -> None:
    sigma, _ = draw(low=0.99)
    assert sigma.shape == (500, 1)
    assert bool((sigma == 1.0).all())


def test_same_generator_same_draw() -> None:
    for first, second in zip(draw(seed=3), draw(seed=3), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(draw(seed=3)[0], draw(seed=4)[0])


def test_global_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    draw()
    draw(mode="continuous", per_image=2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["grid", "continuous"])
def test_common_random_numbers(mode: Any) -> None:
    groups = torch.tensor([4, 9, 4, 9, 4])
    sigma, noise = draw(groups=groups, per_image=2, share_in_group=True, mode=mode)
    for group in (4, 9):
        members = (groups == group).nonzero().flatten()
        assert bool((sigma[members] == sigma[members[0]]).all())
        assert bool((noise[members] == noise[members[0]]).all())
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0, 0], noise[0, 1])


def test_without_sharing_images_of_a_group_differ() -> None:
    sigma, noise = draw(groups=["a"] * 20, per_image=2)
    assert len({tuple(row) for row in sigma.tolist()}) > 5
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_continuous_levels_follow_the_shifted_uniform_density(shift: float) -> None:
    sampler = TimestepSampler(GRID, per_image=2, mode="continuous", low=0.5, high=0.9, shift=shift)
    sigma, _ = sampler.draw(range(20_000), (1, 1, 1), generator())
    flat = sigma.flatten().double().sort().values
    assert 0.5 <= float(flat.min()) < float(flat.max()) <= 0.9

    def unshift(s: Tensor | float) -> Any:
        return s / (shift - (shift - 1) * s)

    uniform = (unshift(flat) - unshift(0.5)) / (unshift(0.9) - unshift(0.5))
    # Kolmogorov-Smirnov distance; 40,000 draws exceed 0.0098 with probability 0.001, and the seed is fixed.
    assert float((uniform - (torch.arange(40_000) + 0.5) / 40_000).abs().max()) < 0.0098


def test_continuous_never_draws_zero() -> None:
    sigma, _ = TimestepSampler(GRID, per_image=4, mode="continuous").draw(range(5000), (1,), generator())
    assert float(sigma.min()) > 0


def test_noise_is_standard_normal() -> None:
    _, noise = draw(per_image=2)
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
