"""The options of GRPO, and those of the balancing."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig

from gradbalance.errors import InvalidArgumentError


@dataclass
class BalancedGRPOConfig(GRPOConfig):
    r"""Configuration of :class:`~gradbalance_trl.BalancedGRPOTrainer`: all of ``trl.GRPOConfig``, and how to balance.

    Two options of TRL mean something more here. ``reward_weights``: a reward of weight 0 is logged and takes no part in
    the training; the others are the priorities of the default balancer, whose ratios alone matter (equal ones: none).
    ``scale_rewards`` is applied to each reward on its own. ``multi_objective_aggregation`` only concerns the logged
    ``reward`` and evaluation.

    Args:
        balance_interval (`int`, *optional*, defaults to `10`):
            Optimizer steps between two refreshes of the coefficients. With LoRA a refresh costs a few percent of a
            step: `1` balances every step afresh. Otherwise it costs about one backward pass per reward.
        balance_ema_decay (`float`, *optional*, defaults to `0.7`):
            How much of the coefficients is kept at a refresh, in [0, 1).
        balance_refresh (`str`, *optional*, defaults to `"write"`):
            `"write"`: a refresh writes the gradient with its new coefficients. `"lagged"`: every gradient comes from
            an ordinary backward pass; a refresh steps with the coefficients of before, and its own count from the next
            step on.

    Both numbers are for the default balancer, ``gradbalance.MARBLE``; the trainer's ``balancer`` replaces it.

    Raises:
        InvalidArgumentError: A number out of its range, a negative weight, an unknown ``balance_refresh``.
    """

    balance_interval: int = field(
        default=10, metadata={"help": "Optimizer steps between two refreshes of the coefficients, >= 1."}
    )
    balance_ema_decay: float = field(
        default=0.7, metadata={"help": "How much of the coefficients is kept at a refresh, in [0, 1)."}
    )
    balance_refresh: str = field(
        default="write",
        metadata={
            "help": "'write': a refresh writes the gradient with its new coefficients; 'lagged': they count from the "
            "next step on, and every gradient comes from an ordinary backward pass.",
            "choices": ["write", "lagged"],
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance_refresh not in ("write", "lagged"):
            raise InvalidArgumentError(
                f"`balance_refresh` should be 'write' or 'lagged'. Found {self.balance_refresh!r}."
            )
        if self.balance_interval < 1:
            raise InvalidArgumentError(
                f"`balance_interval` should be an integer >= 1 (optimizer steps). Found {self.balance_interval!r}."
            )
        if not 0.0 <= self.balance_ema_decay < 1.0:
            raise InvalidArgumentError(f"`balance_ema_decay` should be in [0, 1). Found {self.balance_ema_decay!r}.")
        if any(not weight >= 0 for weight in self.reward_weights or ()):
            raise InvalidArgumentError(
                f"`reward_weights` should be >= 0: priorities, or 0 for a reward that is only logged. Found "
                f"{self.reward_weights}. To lower a reward, negate it in its function."
            )
