"""Supervised multi-task learning: methods compared by mean rank and Delta_m over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torchjd.aggregation import UPGradWeighting
from tqdm import tqdm

import gradbalance as gb
from benchmarks.evidence.statistics import interval, mean_ranks, relative_change
from benchmarks.evidence.store import Store
from benchmarks.evidence.tasks import PROBLEMS, Problem
from benchmarks.report import Result, Table, figure

METHODS: dict[str, Callable[[], gb.Balancer]] = {
    "Mean": gb.Mean,
    "MGDA": gb.MGDA,
    "NashMTL": gb.NashMTL,
    "MARBLE": gb.MARBLE,
    "UPGrad (TorchJD)": UPGradWeighting,
}
LEARNING_RATE = 2e-3


def run(store: Store, *, seeds: int, workers: int, quick: bool) -> Result:
    """Train every method on every problem and seed, in this process; what the store holds is not run again."""
    torch.set_num_threads(1)
    problems = {name: make() for name, make in PROBLEMS.items()}
    cells = [(p, m, s) for p in problems for m in ["alone", *METHODS] for s in range(seeds)]
    measured: dict[tuple[str, str], list[list[float]]] = {}
    for name, method, seed in tqdm(cells, desc="multi-task runs"):
        problem = problems[name]
        scores = store.get(
            f"multitask/{name}/{method}/{seed}", lambda p=problem, m=method, s=seed: _scores(p, m, s, quick)
        )
        measured.setdefault((name, method), []).append([scores[task] for task in problem.tasks])
    results = {key: np.array(rows) for key, rows in measured.items()}
    tables, rows = [], []
    for name, problem in problems.items():
        table, plain = _summary(name, problem, {m: results[name, m] for m in METHODS}, results[name, "alone"])
        tables.append(table)
        rows += plain
    return Result(
        name="multitask",
        settings={"seeds": seeds, "learning_rate": LEARNING_RATE, "optimizer": "Adam"},
        rows=rows,
        tables=tables,
        notes=[
            "Mean over seeds [95 % bootstrap interval over seeds]. Mean rank: of the methods, over tasks; 1 is best. "
            "Change: mean over tasks against models trained on that task alone (Delta_m); larger is better.",
            "Same Adam, learning rate, epochs and data for every method; nothing was tuned per method. Heads get the "
            "plain gradient of their own task.",
        ],
        figures={"evidence-multitask": _figure(rows, problems)},
    )


def _scores(problem: Problem, method: str, seed: int, quick: bool) -> dict[str, float]:
    if method == "alone":
        return {task: _train(problem, gb.Mean(), seed, quick, only=task)[task] for task in problem.tasks}
    return _train(problem, METHODS[method](), seed, quick)


def _train(
    problem: Problem, balancer: gb.Balancer, seed: int, quick: bool, only: str | None = None
) -> dict[str, float]:
    torch.manual_seed(seed)
    (x, *targets), (held_out, *answers) = problem.split(seed)
    model = problem.model()
    groups = [
        {"params": list(model.trunk.parameters())},
        {"params": list(model.heads.parameters()), "balanced": False},
    ]
    optimizer = gb.BalancedOptimizer(torch.optim.Adam(groups, lr=LEARNING_RATE), balancer)
    for _ in range(1 if quick else problem.epochs):
        for batch in torch.randperm(len(x)).split(problem.batch_size):
            losses = problem.losses(model(x[batch]), tuple(target[batch] for target in targets))
            optimizer.backward({only: losses[only]} if only else losses)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return problem.scores(model(held_out), tuple(answers))


def _summary(
    name: str, problem: Problem, values: Mapping[str, NDArray[np.float64]], alone: NDArray[np.float64]
) -> tuple[Table, list[dict[str, object]]]:
    sign = 1 if problem.larger_is_better else -1
    ranks = mean_ranks({method: sign * scores for method, scores in values.items()})
    better = [problem.larger_is_better] * len(problem.tasks)
    rows: list[dict[str, object]] = []
    lines = [["alone", *(f"{score:.3f}" for score in alone.mean(0)), "", "0"]]
    for method, scores in values.items():
        rank, change = interval(ranks[method]), interval(relative_change(scores, alone, better))
        lines.append(
            [
                method,
                *(f"{score:.3f}" for score in scores.mean(0)),
                f"{rank.mean:.1f} [{rank.low:.1f}, {rank.high:.1f}]",
                f"{change.mean:+.1f} % [{change.low:+.1f}, {change.high:+.1f}]",
            ]
        )
        rows.append({"problem": name, "method": method, "scores": scores.tolist(), "rank": rank, "change": change})
    return Table(problem.title, ["method", *problem.tasks, "mean rank", "change"], lines), rows


def _figure(rows: list[dict[str, object]], problems: Mapping[str, Problem]) -> object:
    picture, axes = figure(len(problems), height=2.4)
    for axis, (name, problem) in zip(axes[0], problems.items(), strict=True):
        chosen = [row for row in rows if row["problem"] == name]
        for place, row in enumerate(chosen):
            change = row["change"]
            axis.errorbar(
                change.mean,
                place,
                xerr=[[change.mean - change.low], [change.high - change.mean]],
                fmt="o",
                capsize=3,
                color="#0b6e99" if row["method"] == "MARBLE" else "#8d99ae",
            )
        axis.axvline(0, color="0.6", linewidth=1, zorder=0)
        axis.set_yticks(range(len(chosen)), [row["method"] for row in chosen] if axis is axes[0][0] else [])
        axis.set_ylim(len(chosen) - 0.5, -0.5)
        axis.set_title(problem.title.partition(" (")[0], fontsize=9, loc="left")
        axis.set_xlabel("change against one task alone, %")
    return picture
