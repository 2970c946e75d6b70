"""GRPO with several rewards, balanced in gradient space: a trainer and a config for TRL.

    from gradbalance_trl import BalancedGRPOConfig, BalancedGRPOTrainer

in place of ``from trl import GRPOConfig, GRPOTrainer``; the rest of the script stays.
"""

from .private import check_trl

check_trl()

from .balanced_grpo_config import BalancedGRPOConfig  # noqa: E402 (TRL is looked at first)
from .balanced_grpo_trainer import BalancedGRPOTrainer  # noqa: E402

__all__ = ["BalancedGRPOConfig", "BalancedGRPOTrainer"]
