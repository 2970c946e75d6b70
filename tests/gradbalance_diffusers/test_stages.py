from __future__ import annotations

import itertools

import pytest

from gradbalance import InvalidArgumentError
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.learning_rate import learning_rate_factor
from gradbalance_diffusers.stages import plan_stages, stage_at


def test_no_stages_are_one_stage_with_everything() -> None:
    config = load_config("tiny")
    (stage,) = plan_stages(config, config.reward_names)
    assert (stage.first, stage.last) == (0, config.run.epochs)
    assert stage.rewards == tuple(config.reward_names)
    assert stage.method == "marble"


def test_stages_follow_each_other() -> None:
    stages = "stages=[{name: a, epochs: 2, rewards: [geneval, ocr]}, {name: b, epochs: 3, method: mgda}]"
    config = load_config("tiny", [stages, "run.epochs=5"])
    plan = plan_stages(config, config.reward_names)
    assert [stage_at(plan, epoch).name for epoch in range(7)] == ["a", "a", "b", "b", "b", "b", "b"]
    assert plan[0].rewards == ("ocr", "geneval"), "in the order of the configuration"
    assert plan[1].method == "mgda"


def test_unknown_reward_in_a_stage() -> None:
    with pytest.raises(InvalidArgumentError, match="'speed'"):
        load_config("tiny", ["stages=[{name: a, epochs: 2, rewards: [speed]}]", "run.epochs=2"])


def test_cosine_ends_at_its_ratio_and_never_rises_again() -> None:
    config = load_config("tiny", ["optimizer.warmup_steps=3", "optimizer.final_lr_ratio=0.2"]).optimizer
    factor = learning_rate_factor(config, 20)
    values = [factor(step) for step in range(30)]
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert values[20] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(values[2:]))
