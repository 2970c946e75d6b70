"""Small K x K problems in float64: no autograd, no modules, no randomness."""

from gradbalance.solvers.min_norm import min_norm
from gradbalance.solvers.nash import nash
from gradbalance.solvers.preference import preferred_min_norm
from gradbalance.solvers.solution import Solution

__all__ = ["Solution", "min_norm", "nash", "preferred_min_norm"]
