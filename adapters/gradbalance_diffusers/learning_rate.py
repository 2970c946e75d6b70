"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import OptimizerConfig


def learning_rate_factor(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Factor on ``optimizer.lr`` at a step, for ``torch.optim.lr_scheduler.LambdaLR``.

    Linear warm-up over ``warmup_steps`` (the first step already has 1/warmup_steps), then constant, or a cosine from 1
    to ``final_lr_ratio`` at ``total_steps``.

    >>> from gradbalance_diffusers.config import OptimizerConfig
    >>> factor = learning_rate_factor(OptimizerConfig(schedule="cosine", warmup_steps=2, final_lr_ratio=0.1), 10)
    >>> [round(factor(step), 2) for step in (0, 1, 2, 10)]
    [0.5, 1.0, 1.0, 0.1]
    """
    warmup, final = config.warmup_steps, config.final_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
