"""Time and accuracy of the K x K solvers against TorchJD, SLSQP and plain quadprog.

Run ``python -m benchmarks solvers``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.exact import bargaining_residual, excess, shortest_squared
from benchmarks.gramians import REGIMES, Problem, problems
from benchmarks.methods import Solver, Weights, min_norm_solvers, nash_solvers
from benchmarks.report import COLORS, Result, Table, figure, microseconds, times
from benchmarks.timing import take_turns

COUNTS = (2, 3, 5, 8, 16, 32, 64)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
STYLES = {
    "gradbalance": (COLORS["gradbalance"], "o-"),
    "TorchJD MGDA": (COLORS["TorchJD"], "s-"),
    "TorchJD NashMTL": (COLORS["TorchJD"], "s-"),
    "SLSQP": (COLORS["SLSQP"], "^-"),
    "quadprog": (COLORS["quadprog"], "d--"),
    "TorchJD UPGrad": (COLORS["UPGrad"], "v:"),
}


def run(quick: bool) -> Result:
    """Measure everything."""
    counts = (2, 5, 16) if quick else COUNTS
    rows: list[dict[str, Any]] = []
    for regime in REGIMES:
        for count in counts:
            for dtype in DTYPES:
                drawn = problems(regime, count, DTYPES[dtype], 2 if quick else 8 if count <= 16 else 3)
                about = {"regime": regime, "K": count, "dtype": dtype}
                rows += [about | {"problem": "min-norm"} | found for found in _min_norm(drawn, 2 if quick else 15)]
                rows += [about | {"problem": "nash"} | found for found in _nash(drawn, 1 if quick else 3)]
                print(".", end="", flush=True)
    return Result(
        "solvers",
        {"regimes": REGIMES, "K": counts, "dtypes": list(DTYPES)},
        rows,
        [_table(rows, "min-norm", regime, dtype) for dtype in DTYPES for regime in REGIMES]
        + [_table(rows, "nash", regime, dtype) for dtype in DTYPES for regime in REGIMES],
        _notes(),
        {
            "benchmark-min-norm": _figure(rows, "min-norm", "excess of |x|² over the optimum, ≥ 1e-18"),
            "benchmark-nash": _figure(rows, "nash", "residual max |aₖ(Ga)ₖ − 1|"),
        },
    )


def _min_norm(drawn: Sequence[Problem], rounds: int) -> list[dict[str, Any]]:
    optima = [shortest_squared(problem.exact) for problem in drawn]

    def error(name: str, index: int, weights: Weights) -> float:
        if name == "TorchJD UPGrad":
            # Another problem: there is no excess to speak of.
            return float("nan")
        return excess(drawn[index].exact, weights, optima[index])

    return _measured([min_norm_solvers(problem) for problem in drawn], drawn, error, rounds)


def _nash(drawn: Sequence[Problem], rounds: int) -> list[dict[str, Any]]:
    def error(name: str, index: int, weights: Weights) -> float:
        return bargaining_residual(drawn[index].exact, weights)

    return _measured([nash_solvers(problem) for problem in drawn], drawn, error, rounds)


def _measured(
    solvers: Sequence[dict[str, Solver]],
    drawn: Sequence[Problem],
    error: Callable[[str, int, Weights], float],
    rounds: int,
) -> list[dict[str, Any]]:
    names = list(solvers[0])
    calls = {name: partial(_each, [by_name[name] for by_name in solvers]) for name in names}
    with warnings.catch_warnings():
        # cvxpy and ECOS warn of inaccurate solutions and of their own deprecations; the residual tells.
        warnings.simplefilter("ignore")
        timings = take_turns(calls, baseline="gradbalance", rounds=rounds)
        answers = {name: calls[name]() for name in names}
    found = []
    for name in names:
        solved = [(i, weights) for i, weights in enumerate(answers[name]) if weights is not None]
        errors = [error(name, i, weights) for i, weights in solved]
        cosines = [_worst_cosine(drawn[i], weights) for i, weights in solved]
        timing = asdict(timings[name]) | {"seconds": timings[name].seconds / len(drawn)}
        found.append(
            {"method": name, **timing, "errors": errors, "worst_cosine": cosines, "raised": len(drawn) - len(solved)}
        )
    return found


def _each(solvers: Sequence[Solver]) -> list[Weights | None]:
    answers: list[Weights | None] = []
    for solver in solvers:
        try:
            answers.append(solver())
        except ValueError:
            # quadprog: "matrix G is not positive definite". Counted in the results.
            answers.append(None)
    return answers


def _worst_cosine(problem: Problem, weights: Weights) -> float:
    rows = problem.rows.numpy()
    direction = weights.astype(np.float64) @ rows
    products = rows @ direction / np.linalg.norm(rows, axis=1)
    return float(products.min() / max(np.linalg.norm(direction), np.finfo(float).tiny))


def _table(rows: Sequence[dict[str, Any]], problem: str, regime: str, dtype: str) -> Table:
    chosen = [r for r in rows if (r["problem"], r["regime"], r["dtype"]) == (problem, regime, dtype)]
    names = list(dict.fromkeys(r["method"] for r in chosen))
    judged = [name for name in names if name != "TorchJD UPGrad"]
    lines = []
    for count in dict.fromkeys(r["K"] for r in chosen):
        by_name = {r["method"]: r for r in chosen if r["K"] == count}
        line = [str(count), microseconds(by_name["gradbalance"]["seconds"])]
        line += [times(by_name[name]["ratio"]) for name in names[1:]]
        line += [_errors(by_name[name]) for name in judged]
        if "TorchJD UPGrad" in names:
            line.append(f"{min(by_name['TorchJD UPGrad']['worst_cosine']):+.3f}")
        lines.append(line)
    what = "Min-norm" if problem == "min-norm" else "Nash bargaining"
    error = "excess" if problem == "min-norm" else "residual"
    columns = ["K", "gradbalance µs", *(f"{name} time" for name in names[1:]), *(f"{name} {error}" for name in judged)]
    if "TorchJD UPGrad" in names:
        columns.append("UPGrad worst cosine")
    return Table(f"{what}, {regime}, {dtype} Gramian", columns, lines)


def _errors(row: dict[str, Any]) -> str:
    raised = f", {row['raised']} raised" if row["raised"] else ""
    if not row["errors"]:
        return f"all {row['raised']} raised"
    return f"{np.median(row['errors']):.0e} ({max(row['errors']):.0e}{raised})"


def _notes() -> list[str]:
    return [
        "Times are CPU times of one call with a Gramian that is a torch tensor. A time with × is the median over "
        "rounds of the ratio to gradbalance in the same round: 10× took ten times as long.",
        "Excess: a'Ga over the smallest value possible, minus 1, median and (maximum) over the problems of a cell; "
        "residual: max |aₖ(Ga)ₖ − 1|. Both are computed in 100-digit decimal arithmetic from the exact Gramian of the "
        "rows, so the rounding of the Gramian that the methods were given counts too: it is the floor of the float32 "
        "tables.",
        "UPGrad solves another problem for the same end (no objective opposed); its column gives the most negative "
        "cosine between its direction and a row. An exact solution has none below 0.",
        "TorchJD NashMTL keeps its object between rounds, so it starts from its own last answer to the same problem.",
    ]


def _figure(rows: Sequence[dict[str, Any]], problem: str, error: str) -> Figure:
    result, axes = figure(len(REGIMES), 2)
    for column, regime in enumerate(REGIMES):
        chosen = [r for r in rows if (r["problem"], r["regime"], r["dtype"]) == (problem, regime, "float64")]
        for name in dict.fromkeys(r["method"] for r in chosen):
            color, style = STYLES[name]
            own = [r for r in chosen if r["method"] == name]
            counts = [r["K"] for r in own]
            axes[0, column].plot(counts, [1e6 * r["seconds"] for r in own], style, color=color, label=name)
            medians = [max(float(np.median(r["errors"])), 1e-18) if r["errors"] else np.nan for r in own]
            axes[1, column].plot(counts, medians, style, color=color)
        axes[0, column].set_title(regime)
        for axis in axes[:, column]:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(counts, [str(count) for count in counts])
        axes[1, column].set_xlabel("objectives K")
    axes[0, 0].set_ylabel("CPU time per call, µs")
    axes[1, 0].set_ylabel(error, fontsize=8)
    axes[0, 0].legend(fontsize=7)
    return result
