from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, NonFiniteError
from gradbalance_diffusers.advantages import group_advantages

NAN = math.nan


def literal(rewards: list[list[float]], groups: list[int], std: str, eps: float) -> list[list[float]]:
    """One reward, one group, one sample at a time, with the statistics module; NaN is missing."""
    size = len(rewards[0])
    out = [[0.0] * size for _ in rewards]
    for k in range(size):
        defined = [row[k] for row in rewards if not math.isnan(row[k])]
        for group in set(groups):
            members = [i for i, g in enumerate(groups) if g == group and not math.isnan(rewards[i][k])]
            values = [rewards[i][k] for i in members]
            if len(values) < 2:
                continue
            mean = statistics.fmean(values)
            if max(abs(v - mean) for v in values) <= 1e-6 * max(abs(v) for v in values):
                continue
            scale = statistics.pstdev(defined if std == "global" else values)
            for i in members:
                out[i][k] = (rewards[i][k] - mean) / (scale + eps)
    return out


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    size, samples = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    # Few distinct values, so that groups without spread occur; gaps, so that groups of one and empty groups do.
    value = st.one_of(st.sampled_from([0.0, 0.35, 1.0, NAN]), st.floats(-100, 100).map(lambda x: round(x, 3)))
    rewards = [[draw(value) for _ in range(size)] for _ in range(samples)]
    return rewards, [draw(st.integers(0, 3)) for _ in range(samples)]


@settings(deadline=None, max_examples=150)
@given(table=tables(), std=st.sampled_from(["global", "group"]))
def test_agrees_with_the_literal_definition(table: tuple[list[list[float]], list[int]], std: Any) -> None:
    rewards, groups = table
    found = group_advantages(torch.tensor(rewards), None, groups, std=std)
    expected = torch.tensor(literal(torch.tensor(rewards).tolist(), groups, std, 1e-4))
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.mask, ~torch.tensor(rewards).isnan())


@settings(deadline=None, max_examples=50)
@given(table=tables(), order=st.randoms(use_true_random=False), std=st.sampled_from(["global", "group"]))
def test_shuffling_samples_shuffles_advantages(table: Any, order: Any, std: Any) -> None:
    rewards, groups = torch.tensor(table[0]), table[1]
    permutation = list(range(len(groups)))
    order.shuffle(permutation)
    straight = group_advantages(rewards, None, groups, std=std)
    shuffled = group_advantages(rewards[permutation], None, [groups[i] for i in permutation], std=std)
    torch.testing.assert_close(shuffled.values, straight.values[permutation])
    assert torch.equal(shuffled.degenerate, straight.degenerate)
    assert torch.equal(shuffled.groups, straight.groups)


def advantages(rewards: list[list[float]] | Tensor, groups: Any = None, **options: Any) -> Any:
    rewards = torch.as_tensor(rewards)
    return group_advantages(rewards, None, groups if groups is not None else [0] * len(rewards), **options)


@pytest.mark.parametrize("std", ["global", "group"])
def test_one_missing_reward_does_not_poison_the_batch(std: Any) -> None:
    found = advantages([[1, 0.5], [0, NAN], [1, 0.2], [0, 0.9]], std=std)
    assert bool(found.values.isfinite().all())
    assert found.values[1, 1] == 0
    assert found.mask.tolist() == [[True, True], [True, False], [True, True], [True, True]]
    assert found.values[:, 0].tolist() == pytest.approx([1, -1, 1, -1], rel=1e-3)
    assert float(found.values[:, 1].sum()) == pytest.approx(0, abs=1e-6)


def test_sample_missing_everywhere_is_no_zero() -> None:
    found = advantages([[NAN], [-1.0], [-1.0], [NAN]])
    assert found.values.tolist() == [[0.0]] * 4
    assert found.degenerate.tolist() == [1]


def test_group_of_one() -> None:
    found = advantages([[3.0], [1.0], [2.0], [NAN]], groups=["a", "b", "b", "a"])
    assert found.values[0, 0] == found.values[3, 0] == 0
    assert found.values[2, 0] > 0 > found.values[1, 0]
    assert found.degenerate.tolist() == [1]
    assert found.groups.tolist() == [2]


def test_constant_group_beside_a_live_one() -> None:
    found = advantages([[1.0], [1.0], [0.0], [4.0]], groups=[5, 5, 9, 9], std="group")
    assert found.values.flatten().tolist() == pytest.approx([0, 0, -1, 1], rel=1e-3)
    assert found.values[:2].tolist() == [[0.0], [0.0]]
    assert found.degenerate.tolist() == [1]


def test_statistics_are_of_samples_not_of_repeats() -> None:
    """Population deviation of 0, 1, 2, 3 is sqrt(5)/2; repeating rows later must not enter it."""
    found = advantages([[0.0], [1.0], [2.0], [3.0]], eps=0.0)
    assert found.values.flatten().tolist() == pytest.approx([x / (math.sqrt(5) / 2) for x in (-1.5, -0.5, 0.5, 1.5)])


def test_groups_are_by_id_not_by_position() -> None:
    found = advantages([[0.0], [10.0], [1.0], [11.0]], groups=[0, 1, 0, 1], std="group", eps=0.5)
    assert found.values.flatten().tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5])


@pytest.mark.parametrize("ids", [torch.tensor([7, 3, 7, 3]), ["cat", "dog", "cat", "dog"], [(1, "a"), (1, "b")] * 2])
def test_ids_of_any_kind(ids: Any) -> None:
    expected = advantages([[0.0], [10.0], [1.0], [11.0]], groups=[0, 1, 0, 1])
    assert torch.equal(advantages([[0.0], [10.0], [1.0], [11.0]], groups=ids).values, expected.values)


def test_global_and_group_deviation_differ() -> None:
    rewards, groups = [[0.0], [1.0], [0.0], [100.0]], [0, 0, 1, 1]
    by_group = advantages(rewards, groups, std="group").values
    by_batch = advantages(rewards, groups, std="global").values
    assert by_group.flatten().tolist() == pytest.approx([-1, 1, -1, 1], rel=1e-3)
    assert by_batch[3] > 10 * by_batch[1]


def test_rewards_that_apply_to_their_own_prompts() -> None:
    """8 samples in 4 groups; one reward for all, one for two groups, one for one group, one for none."""
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    rewards = torch.full((8, 4), NAN)
    rewards[:, 0] = torch.arange(8.0)
    rewards[:4, 1] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    rewards[6:, 2] = torch.tensor([0.2, 0.4])
    found = advantages(rewards, groups)
    assert found.groups.tolist() == [4, 2, 1, 0]
    assert found.degenerate.tolist() == [0, 0, 0, 0]
    assert not found.values[4:, 1].any()
    assert not found.values[:6, 2].any()
    assert not found.values[:, 3].any()
    # The ranges of other prompts do not enter: population deviation of 0, 1, 1, 0.
    assert found.values[:4, 1].tolist() == pytest.approx([-1, 1, 1, -1], rel=1e-3)


@pytest.mark.parametrize("constant", [0.3, 0.35, 0.4, 1e-7, 123456.7, -0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_off_is_no_signal(constant: float, dtype: torch.dtype) -> None:
    found = advantages(torch.full((7, 1), constant, dtype=dtype), eps=1e-12)
    assert not found.values.any()
    assert found.degenerate.tolist() == [1]


def test_float32_noise_around_a_constant_is_no_signal() -> None:
    found = advantages([[0.7], [0.7 + 1e-7], [0.7 - 1e-7], [0.7]], eps=1e-8)
    assert not found.values.any()
    assert found.degenerate.tolist() == [1]


def test_small_real_differences_are_signal() -> None:
    assert advantages([[1e-9], [2e-9]], eps=0.0).values.flatten().tolist() == pytest.approx([-1, 1])


@pytest.mark.parametrize("std", ["global", "group"])
def test_units_of_a_reward_do_not_matter(std: Any) -> None:
    g = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(24, 2, generator=g, dtype=torch.float64), torch.arange(24) % 4
    changed = rewards * torch.tensor([100.0, 1.0]) + torch.tensor([7.0, 0.0])
    straight, scaled = (advantages(r, groups, std=std, eps=0.0).values for r in (rewards, changed))
    torch.testing.assert_close(scaled, straight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_low_precision_rewards_are_promoted(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[1], [1], [1], [2]], dtype=dtype)
    found = advantages(rewards, eps=0.0)
    assert found.values.dtype == torch.float32
    assert found.values.flatten().tolist() == pytest.approx([x / math.sqrt(3) for x in (-1, -1, -1, 3)])


def test_masked_values_do_not_enter_even_if_finite() -> None:
    rewards = torch.tensor([[0.0], [1.0], [1000.0]])
    mask = torch.tensor([[True], [True], [False]])
    found = group_advantages(rewards, mask, [0, 0, 0], eps=0.0)
    assert found.values.flatten().tolist() == pytest.approx([-1, 1, 0])


def test_inputs_are_not_changed() -> None:
    rewards = torch.tensor([[NAN], [1.0], [2.0]])
    advantages(rewards)
    assert rewards.isnan().tolist() == [[True], [False], [False]]


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_non_finite_where_the_mask_is_true(value: float) -> None:
    with pytest.raises(NonFiniteError, match="sample 1, reward 0"):
        group_advantages(torch.tensor([[0.0], [value]]), torch.ones(2, 1, dtype=torch.bool), [0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), None, [0, 0, 0]), "rewards"),
        ((torch.zeros(3, 1), torch.ones(3, 2), [0, 0, 0]), "mask"),
        ((torch.zeros(3, 1), None, [0, 0]), "2 ids for 3 samples"),
    ],
)
def test_bad_shapes(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        group_advantages(*arguments)


def test_bad_options() -> None:
    with pytest.raises(InvalidArgumentError, match="std"):
        advantages([[0.0]], std="batch")
    with pytest.raises(InvalidArgumentError, match="eps"):
        advantages([[0.0]], eps=-1.0)


def test_missing_rewards_may_count_as_advantage_zero() -> None:
    rewards = torch.tensor([[1.0, torch.nan], [3.0, torch.nan], [2.0, 5.0], [4.0, 9.0]])
    masked = group_advantages(rewards, None, [0, 0, 1, 1])
    counted = masked.counting_missing()
    assert counted.mask.all()
    assert counted.values[:2, 1].tolist() == [0.0, 0.0]
    assert torch.equal(counted.values, masked.values)
    assert not masked.mask.all()


@given(st.floats(1e-6, 1e6), st.floats(-100, 100))
def test_without_epsilon_advantages_have_no_unit(scale: float, shift: float) -> None:
    rewards = torch.tensor([[0.1], [0.4], [0.2], [0.9]], dtype=torch.float64)
    plain = group_advantages(rewards, None, [0, 0, 1, 1], eps=0.0)
    other = group_advantages(scale * (rewards + shift), None, [0, 0, 1, 1], eps=0.0)
    torch.testing.assert_close(other.values, plain.values, rtol=1e-5, atol=1e-5)
