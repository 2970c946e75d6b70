"""A training run as a sequence of stages: which rewards, prompts and method, for how many epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class Stage:
    """Epochs ``first <= epoch < last`` of a run.

    Attributes:
        name: Label in logs and report.
        first: First epoch.
        last: One past the last epoch.
        rewards: Names of the rewards trained on, in the order of the configuration.
        mix: Share of each prompt source.
        method: Balancing method, as in ``balance.method``.
    """

    name: str
    first: int
    last: int
    rewards: tuple[str, ...]
    mix: Mapping[str, float]
    method: str


def plan_stages(config: Config, reward_names: Sequence[str]) -> list[Stage]:
    """The stages of ``config``; without any, one stage of ``run.epochs`` with everything.

    A list of stages with one reward each is the sequential schedule that DiffusionNFT uses; one stage with one reward
    trains a specialist.
    """
    if not config.stages:
        everything = Stage("all", 0, config.run.epochs, tuple(reward_names), config.prompts.mix, config.balance.method)
        return [everything]
    stages, first = [], 0
    for stage in config.stages:
        wanted = reward_names if stage.rewards is None else stage.rewards
        stages.append(
            Stage(
                name=stage.name,
                first=first,
                last=first + stage.epochs,
                rewards=tuple(name for name in reward_names if name in wanted),
                mix=stage.mix or config.prompts.mix,
                method=stage.method or config.balance.method,
            )
        )
        first += stage.epochs
    return stages


def stage_at(stages: Sequence[Stage], epoch: int) -> Stage:
    """The stage that ``epoch`` belongs to; the last one if it lies past the end."""
    return next((stage for stage in stages if stage.first <= epoch < stage.last), stages[-1])
