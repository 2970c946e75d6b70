"""Advantages of each reward on its own."""

from __future__ import annotations

import pytest
import torch

import gradbalance as gb
from gradbalance_trl.advantages import advantages_per_reward, mixed
from gradbalance_trl.rewards import PATIENCE, SilenceWatch, balanced_rewards

NAN = float("nan")


def by_loops(rewards: torch.Tensor, size: int, scale: str) -> torch.Tensor:
    """The formula, one number at a time."""
    out = torch.zeros(rewards.shape, dtype=torch.float64)
    for k in range(rewards.shape[1]):
        defined = [r for r in rewards[:, k].double().tolist() if r == r]
        for start in range(0, len(rewards), size):
            group = rewards[start : start + size, k].double().tolist()
            known = [r for r in group if r == r]
            if not known or max(known) == min(known):
                continue
            spread = {"group": known, "batch": defined, "none": None}[scale]
            divisor = 1.0 if spread is None else torch.tensor(spread, dtype=torch.float64).std().item() + 1e-4
            mean = sum(known) / len(known)
            for i, r in enumerate(group):
                out[start + i, k] = (r - mean) / divisor if r == r else 0.0
    return out


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equals_the_formula(scale: str) -> None:
    rewards = torch.randn(24, 5) * torch.tensor([1e-3, 1.0, 1e4, 1.0, 1.0]) + torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0])
    rewards[torch.rand(24, 5) < 0.3] = NAN
    rewards[:, 4] = NAN
    rewards[:4, 3] = 0.7
    found = advantages_per_reward(rewards, 4, scale)
    torch.testing.assert_close(found.double(), by_loops(rewards, 4, scale), rtol=1e-5, atol=1e-5)
    assert found.dtype == torch.float32


def test_one_missing_reward_leaves_its_siblings_alone() -> None:
    """E1: mean and deviation over what is defined; the missing entry moves nothing."""
    found = advantages_per_reward(torch.tensor([[1, 0.5], [0, NAN], [1, 0.2], [0, 0.9]]), 4)
    assert found.isfinite().all()
    assert found[1, 1] == 0
    alone = advantages_per_reward(torch.tensor([[0.5], [0.2], [0.9]]), 3)
    torch.testing.assert_close(found[[0, 2, 3], 1], alone[:, 0])


def test_missing_everywhere_is_not_a_reward_of_zero() -> None:
    """E2: completions without any reward are no better than those that failed."""
    assert not advantages_per_reward(torch.tensor([[NAN], [-1.0], [-1.0], [NAN]]), 4).any()


def test_groups_of_one_defined_sample_tell_nothing() -> None:
    """E10: no NaN from the deviation of one number."""
    for scale in ("group", "batch", "none"):
        assert not advantages_per_reward(torch.tensor([[3.0], [NAN], [NAN], [7.0]]), 2, scale).any()


def test_equal_rewards_are_exactly_silent() -> None:
    """A mean of equal float32 numbers is off by rounding, which the division by 1e-4 would make a gradient."""
    for value in (0.1, 1 / 3, 1e6 + 0.1, -7e-5):
        rewards = torch.full((12, 1), value)
        assert not advantages_per_reward(rewards, 6).any()


def test_scale_and_shift_of_a_reward_do_not_matter() -> None:
    """E8: no reward decides everything because its numbers are large."""
    rewards = torch.tensor([[1.0, 0], [1, 100], [0, 200], [0, 300]])
    other = rewards * torch.tensor([100.0, 0.01]) + 7
    torch.testing.assert_close(advantages_per_reward(rewards, 4), advantages_per_reward(other, 4), rtol=2e-4, atol=1e-4)


def test_bad_rewards_are_named() -> None:
    with pytest.raises(gb.NonFiniteError, match="length") as caught:
        advantages_per_reward(torch.tensor([[0.0, float("inf")], [1.0, 0.0]]), 2, names=["correct", "length"])
    assert caught.value.objectives == ("length",)
    with pytest.raises(gb.InvalidArgumentError, match="num_generations = 3"):
        advantages_per_reward(torch.zeros(4, 2), 3)
    with pytest.raises(gb.InvalidArgumentError, match="'all'"):
        advantages_per_reward(torch.zeros(4, 2), 2, "all")


def test_mixture() -> None:
    advantages, weights = torch.randn(6, 3), torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(mixed(advantages, weights), advantages @ weights.float())


def test_weight_zero_leaves_a_reward_out_and_names_stay_distinct() -> None:
    kept = balanced_rewards(["a", "b", "a", "a"], [1.0, 0.0, 1.0, 1.0])
    assert kept.names == ("a", "a_2", "a_3")
    assert kept.columns == (0, 2, 3)
    assert kept.preference is None
    assert balanced_rewards(["a", "b"], [1.0, 3.0]).preference == (1.0, 3.0)
    with pytest.raises(gb.InvalidArgumentError, match="at least one of the rewards"):
        balanced_rewards(["a", "b"], [0.0, 0.0])


def test_a_dead_reward_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """E16: a scorer that always gives the same is named after some generations."""
    watch = SilenceWatch(["alive", "dead"])
    for _ in range(2 * PATIENCE):
        watch.look(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert [record.args[0] for record in caplog.records] == ["dead"]
    watch.look(torch.ones(2, 2))
    for _ in range(PATIENCE):
        watch.look(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert len(caplog.records) == 2
