"""For authors of balancers: inputs with proved properties, named invariants, and one call that checks them.

    pip install "gradbalance[testing]"

>>> import gradbalance as gb
>>> from gradbalance.testing import check_balancer, non_conflict, simplex
>>> check_balancer(gb.MGDA, claims=[simplex, non_conflict], max_examples=20)

An invariant is a function of a factory and a :class:`Case`; its docstring says what it claims. Your own functions of
that form are as good as those here.
"""

from importlib.util import find_spec

from gradbalance.errors import MissingDependencyError

if find_spec("hypothesis") is None:
    raise MissingDependencyError(
        'gradbalance.testing needs the package hypothesis. Run: pip install "gradbalance[testing]"'
    )

# After the check above, which has the better message.
from gradbalance.testing.case import Case
from gradbalance.testing.check import ClaimError, Failure, check_balancer
from gradbalance.testing.conduct import (
    constant,
    determinism,
    keeps_protocol,
    leaves_input_alone,
    memoryless,
    plain_state,
    refuses_non_finite,
    state_round_trip,
)
from gradbalance.testing.geometry import (
    equal_gain,
    min_norm_optimality,
    non_conflict,
    rests_when_stationary,
    unit_min_norm_optimality,
)
from gradbalance.testing.invariant import Invariant, on
from gradbalance.testing.kinds import KINDS, NON_STATIONARY, STATIONARY
from gradbalance.testing.strategies import grams, rows
from gradbalance.testing.symmetry import (
    permutation_equivariance,
    scale_equivariance,
    scale_invariance,
    ties_share,
    zero_rows_change_nothing,
)
from gradbalance.testing.weights import (
    finite_output,
    non_negative_weights,
    simplex,
    simplex_coefficients,
    zero_rows_get_zero_weight,
)

__all__ = [
    "KINDS",
    "NON_STATIONARY",
    "STATIONARY",
    "Case",
    "ClaimError",
    "Failure",
    "Invariant",
    "check_balancer",
    "constant",
    "determinism",
    "equal_gain",
    "finite_output",
    "grams",
    "keeps_protocol",
    "leaves_input_alone",
    "memoryless",
    "min_norm_optimality",
    "non_conflict",
    "non_negative_weights",
    "on",
    "permutation_equivariance",
    "plain_state",
    "refuses_non_finite",
    "rests_when_stationary",
    "rows",
    "scale_equivariance",
    "scale_invariance",
    "simplex",
    "simplex_coefficients",
    "state_round_trip",
    "ties_share",
    "unit_min_norm_optimality",
    "zero_rows_change_nothing",
    "zero_rows_get_zero_weight",
]
