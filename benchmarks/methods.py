"""The solvers under test, each as one call from a Gramian to weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import quadprog
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torchjd.aggregation import MGDAWeighting, NashMTL, UPGradWeighting

import gradbalance as gb
from benchmarks.gramians import Problem

Weights: TypeAlias = NDArray[Any]
Solver: TypeAlias = Callable[[], Weights]


def min_norm_solvers(problem: Problem) -> dict[str, Solver]:
    """Solvers of ``min a' G a`` over the simplex, and UPGrad, which solves another problem for the same purpose."""
    gram = problem.gram
    mgda, upgrad = MGDAWeighting(), UPGradWeighting()
    return {
        "gradbalance": lambda: gb.min_norm(gram).weights,
        "TorchJD MGDA": lambda: mgda(gram).numpy(),
        "SLSQP": lambda: slsqp(gram),
        "quadprog": lambda: plain_quadprog(gram),
        "TorchJD UPGrad": lambda: upgrad(gram).numpy(),
    }


def nash_solvers(problem: Problem) -> dict[str, Solver]:
    """Solvers of ``G a = 1/a``. TorchJD's keeps its object between calls, so that it starts from its last answer."""
    rows, gram = problem.rows.to(problem.gram.dtype), problem.gram
    # max_norm = 0: no rescaling of the weights.
    bargaining = NashMTL(n_tasks=len(gram), max_norm=0.0).weighting
    return {
        "gradbalance": lambda: gb.nash(gram).weights,
        "TorchJD NashMTL": lambda: bargaining(rows).numpy(),
    }


def slsqp(gram: Tensor) -> Weights:
    """SciPy's general solver with the exact gradient, from uniform weights."""
    matrix = gram.double().numpy()
    count = len(matrix)
    result = minimize(
        lambda a: 0.5 * a @ matrix @ a,
        np.full(count, 1 / count),
        jac=lambda a: matrix @ a,
        method="SLSQP",
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-8},
    )
    answer: Weights = result.x
    return answer


def plain_quadprog(gram: Tensor) -> Weights:
    """Goldfarb and Idnani's method as it is mostly called: G over its mean diagonal, plus 1e-10 on the diagonal."""
    matrix = gram.double().numpy()
    count = len(matrix)
    scaled = matrix / matrix.diagonal().mean() + 1e-10 * np.eye(count)
    constraints = np.column_stack([np.ones(count), np.eye(count)])
    bounds = np.zeros(count + 1)
    bounds[0] = 1
    answer: Weights = quadprog.solve_qp(scaled, np.zeros(count), constraints, bounds, meq=1)[0]
    return answer
