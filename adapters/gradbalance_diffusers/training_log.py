"""Rows of metrics.jsonl. They hold no clock times, so an interrupted and resumed run writes the same bytes."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import Any

import gradbalance as gb

from .advantages import Advantages
from .evaluation import Evaluation
from .first_rank import SilentFolder
from .rewards.base import RewardTable
from .run_folder import RunFolder
from .update import StepResult


def training_row(
    *,
    epoch: int,
    step: int,
    stage: str,
    rewards: RewardTable,
    advantages: Advantages,
    result: StepResult,
    old_decay: float,
    meter: gb.ConflictMeter | None = None,
) -> dict[str, Any]:
    """One optimizer step: rewards of the epoch's samples, the balance, and what the step did.

    ``expected`` is what ``meter`` has found so far, on the steps that fed it.

    ``loss`` is the mean of (L+ + L-)/2; it says how well the policy denoises, not how good the rewards are.
    """
    info = result.info
    names = info.names
    return {
        "kind": "train",
        "epoch": epoch,
        "step": step,
        "stage": stage,
        "rewards": rewards.means(),
        "reward_std": rewards.stds(),
        "valid": rewards.counts(),
        "masked_errors": dict(rewards.errors),
        "loss": result.loss,
        "kl": result.kl,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "old_decay": old_decay,
        "weights": _named(names, info.weights),
        "coefficients": _named(names, info.coefficients),
        "norms": _named(names, info.norms),
        "refreshed": info.refreshed,
        "collector": info.collector,
        "cosines": _named(names, info.cosines),
        "conflicts": _pairs(names, info),
        "expected": measured(meter) if info.refreshed and meter is not None else None,
        "inactive": list(info.inactive),
        "skipped": list(info.skipped),
        "overflows": result.overflows,
        "loss_scale": result.loss_scale,
        "degenerate_groups": _named(names, advantages.degenerate),
    }


def measured(meter: gb.ConflictMeter) -> dict[str, Any] | None:
    """What a conflict meter has found: cosines with their standard errors; None before the second batch."""
    if meter.batches < 2:
        return None
    return {"batches": meter.batches, "pairs": [asdict(pair) for pair in meter.pairs()]}


def evaluation_row(evaluation: Evaluation, base: Evaluation, *, step: int) -> dict[str, Any]:
    """Scores on the held-out prompts and their paired change against the untrained policy."""
    return {
        "kind": "eval",
        "epoch": evaluation.epoch,
        "step": step,
        "rewards": evaluation.summary(),
        "change": evaluation.change_from(base) if evaluation.epoch > base.epoch else None,
    }


def save_evaluation(folder: RunFolder | SilentFolder, evaluation: Evaluation) -> None:
    """Per-prompt scores, and the pictures that the evaluation has kept."""
    folder.save_evaluation(evaluation.as_json(list(evaluation.images)), evaluation.images)


def _named(names: tuple[str, ...], values: Any) -> dict[str, Any] | None:
    return None if values is None else dict(zip(names, [v.item() for v in values], strict=True))


def _pairs(names: tuple[str, ...], info: gb.BalanceInfo) -> dict[str, float] | None:
    if info.gram is None:
        return None
    cosines = gb.cosines(info.gram)
    return {f"{names[i]}|{names[j]}": float(cosines[i, j]) for i, j in combinations(range(len(names)), 2)}
