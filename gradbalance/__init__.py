"""Multi-objective gradient balancing for PyTorch.

Losses -> per-objective gradients -> Gramian -> weights -> one gradient -> any torch optimizer.
"""

from . import distributed
from .affine import AffineLoss
from .balancers import MARBLE, MGDA, Balancer, ConstantBalancer, Fixed, Mean, NashMTL, StatefulBalancer
from .conflict_meter import ConflictMeter
from .diagnostics import ConflictRate, summary
from .errors import (
    CollectorError,
    GradBalanceError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteError,
    RanksError,
    StateError,
)
from .gradients.record import record
from .gramian import cosines, gramian
from .info import BalanceInfo
from .optimizer import BalancedOptimizer
from .solvers import Solution, min_norm, nash
from .step import backward

__version__ = "0.1.0"

__all__ = [
    "MARBLE",
    "MGDA",
    "AffineLoss",
    "BalanceInfo",
    "BalancedOptimizer",
    "Balancer",
    "CollectorError",
    "ConflictMeter",
    "ConflictRate",
    "ConstantBalancer",
    "Fixed",
    "GradBalanceError",
    "InvalidArgumentError",
    "Mean",
    "MissingDependencyError",
    "NashMTL",
    "NonFiniteError",
    "RanksError",
    "Solution",
    "StateError",
    "StatefulBalancer",
    "backward",
    "cosines",
    "distributed",
    "gramian",
    "min_norm",
    "nash",
    "record",
    "summary",
]
