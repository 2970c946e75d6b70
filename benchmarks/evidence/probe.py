"""What every method would do on the batches of a training run: one Gramian per optimizer step.

All that the experiments ask of gradients (cosines, coefficients, cached directions) are inner products of a few dozen
vectors that one recorded forward gives together. They are stored as one matrix per step; the rest is arithmetic on it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import gradbalance as gb
from benchmarks.evidence.groups import GroupGradients
from benchmarks.evidence.store import Store
from benchmarks.evidence.trainer import trainer_in
from gradbalance_diffusers.advantages import group_advantages
from gradbalance_diffusers.assembly import make_optimizer
from gradbalance_diffusers.balance import weighted_sum
from gradbalance_diffusers.config import Config, OptimizerConfig, load_config
from gradbalance_diffusers.nft import optimality
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.trainer import NFTTrainer
from gradbalance_diffusers.update import EpochData, PolicyUpdate, StepResult

# What "the first micro-batch" is, as a share of the samples of an optimizer step at one noise level.
FIRST = 1 / 8
GROUP_EPOCHS = 20
QUICK = ("run.epochs=2", "prompts.groups_per_epoch=8", "prompts.images_per_prompt=4")

# Samples of one noise level of an epoch -> labels of R vectors and their coefficients [R, 2, b] on (L+, L-).
Vectors = Callable[[Config, EpochData, Tensor, int], tuple[list[str], Tensor]]


class ProbedUpdate(PolicyUpdate):
    """Looks at the gradients of some vectors before each optimizer step.

    Attributes:
        vectors: Which ones.
        look: Called with their labels, their Gramian ``[R, R]`` and the blocks of their rows, which it may copy.
    """

    vectors: Vectors
    look: Callable[[list[str], Tensor, Sequence[Tensor]], None]

    def step(self, data: EpochData, samples: Tensor) -> StepResult:
        """Look, then take the step."""
        seen: list[tuple[list[str], Sequence[Tensor]]] = []

        def see(rows: Sequence[Tensor], names: Sequence[str]) -> None:
            seen.append((list(names), rows))

        def nothing(gram: Tensor) -> Tensor:
            names, rows = seen.pop()
            self.look(names, gram, rows)
            return torch.zeros(len(gram), dtype=gram.dtype)

        probe = gb.BalancedOptimizer(
            torch.optim.SGD(self.policy.parameters.values(), lr=0.0),
            nothing,
            module=self.policy.transformer,
            on_rows=see,
        )
        for level in range(data.draws.sigma.shape[1]):
            positive, negative, _ = self._terms(data, samples, level)
            labels, coefficients = self.vectors(self.config, data, samples, level)
            probe.backward(gb.AffineLoss(torch.stack([positive, negative]), coefficients, labels))
        probe.balance()
        probe.zero_grad()
        return super().step(data, samples)


def probed_runs(
    name: str, overrides: Sequence[str], store: Store, *, seeds: int, workers: int, quick: bool
) -> list[dict[str, Any]]:
    """MARBLE runs of the tiny preset with :func:`method_vectors` seen on every step.

    Returns:
        Per seed ``{"names": K rewards, "records": [{"epoch", "position", "labels", "gram"}, ...]}``; position counts
        the steps of an epoch from 0, the first after the old policy was moved.
    """
    measure = partial(_probed_run, name, tuple(overrides), store, quick)
    # spawn: torch's threads do not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(tqdm(pool.map(measure, range(seeds)), total=seeds, desc="probed runs"))


def _probed_run(name: str, overrides: tuple[str, ...], store: Store, quick: bool, seed: int) -> dict[str, Any]:
    return store.get(f"probe/{name}/{seed}", lambda: _probe(overrides, seed, quick))


def _probe(overrides: tuple[str, ...], seed: int, quick: bool) -> dict[str, Any]:
    records: list[dict[str, Any]] = []

    def look(labels: list[str], gram: Tensor, rows: Sequence[Tensor]) -> None:
        records.append({"labels": labels, "gram": gram.tolist()})

    config = load_config("tiny", [*overrides, f"run.seed={seed}", *(QUICK if quick else ())])
    trainer = _train(config, method_vectors, look, make_optimizer, config.run.epochs)
    per_epoch = config.optimizer.steps_per_epoch
    for number, record in enumerate(records):
        record |= {"epoch": number // per_epoch, "position": number % per_epoch}
    return {"names": list(trainer.rewards.names), "records": records}


def group_gradients(store: Store, *, name: str, overrides: Sequence[str], seed: int, quick: bool) -> GroupGradients:
    """Centered per-group reward gradients of many prompt groups, all at the untrained policy."""
    kept = store.get(f"{name}/{seed}", lambda: _group_gradients(overrides, seed, quick))
    return GroupGradients(np.array(kept["gram"]), np.array(kept["counts"]))


def _group_gradients(overrides: Sequence[str], seed: int, quick: bool) -> dict[str, Any]:
    rows: list[Tensor] = []

    def look(labels: list[str], gram: Tensor, blocks: Sequence[Tensor]) -> None:
        rows.append(torch.cat(list(blocks), dim=1))

    config = load_config("tiny", [*overrides, f"run.seed={seed}", *(QUICK if quick else ())])
    vectors = GroupVectors()
    # A learning rate of 0 keeps the policy where it is.
    _train(config, vectors, look, _still, 2 if quick else GROUP_EPOCHS)
    everything = torch.cat(rows).double()
    return {"gram": (everything @ everything.T).tolist(), "counts": vectors.counts}


def _still(config: OptimizerConfig, policy: SD3Policy) -> torch.optim.Optimizer:
    return torch.optim.SGD(policy.parameters.values(), lr=0.0)


def _train(
    config: Config,
    vectors: Vectors,
    look: Callable[[list[str], Tensor, Sequence[Tensor]], None],
    optimizer_for: Callable[[OptimizerConfig, SD3Policy], torch.optim.Optimizer],
    epochs: int,
) -> NFTTrainer:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place, "run")) as folder:
        trainer = trainer_in(folder, config, optimizer_for)
        optimizer = trainer.update.inner_optimizer
        steps = epochs * config.optimizer.steps_per_epoch
        update = ProbedUpdate(config, trainer.policy, optimizer, total_steps=steps)
        update.vectors, update.look = vectors, look
        update.enter_stage(trainer.stage)
        trainer.update = update
        for epoch in range(epochs):
            trainer.train_epoch(epoch)
    return trainer


class GroupVectors:
    """The centered loss of every (prompt group, reward), as a sum over its samples.

    Attributes:
        counts: Per group seen so far, the defined (sample, level) pairs of each reward.
    """

    def __init__(self) -> None:
        self.counts: list[list[float]] = []

    def __call__(self, config: Config, data: EpochData, samples: Tensor, level: int) -> tuple[list[str], Tensor]:
        """All groups of an epoch; ``samples`` must be all of its samples."""
        size = config.prompts.images_per_prompt
        mask = data.advantages.mask[samples].double()
        member = torch.nn.functional.one_hot(samples // size).double()
        centered = mask * (data.r[samples].double() - 0.5)
        positive = (member[:, :, None] * centered[:, None, :]).flatten(1).T
        if level == 0:
            self.counts += (data.draws.sigma.shape[1] * member.T @ mask).tolist()
        labels = [f"{group}:{name}" for group in range(member.shape[1]) for name in data.names]
        return labels, torch.stack([positive, -positive], dim=1)


def method_vectors(config: Config, data: EpochData, samples: Tensor, level: int) -> tuple[list[str], Tensor]:
    r"""Coefficients ``[R, 2, b]`` of (L+, L-) of ``samples`` at one noise level, for all vectors of interest.

    With r the optimality of a reward and m its mask, n its count of (sample, level) pairs in the step:

    * ``full:k``: :math:`(m r / n, m (1 - r) / n)`, the loss of reward k.
    * ``centered:k``: :math:`(m (r - 1/2) / n, -m (r - 1/2) / n)`, the same without the part all rewards share.
    * ``zero:k``: missing rewards as advantage 0 (r = 1/2), mean over all samples, as published on cached steps.
    * ``first:k``: ``centered:k`` of the first micro-batch only.
    * ``sum``, ``centered:sum``: the same two for the advantage of the summed reward.
    * ``common``: :math:`(1/2, 1/2)` over all pairs.
    """
    levels = data.draws.sigma.shape[1]
    mask = data.advantages.mask[samples].double()
    r = data.r[samples].double()
    counts = (mask.sum(0) * levels).clamp(min=1)
    pairs = len(samples) * levels
    share = mask / counts
    summed, present = weighted_sum(data.rollout.rewards, {})
    groups = torch.arange(len(data.r)) // config.prompts.images_per_prompt
    r_sum = optimality(group_advantages(summed, present, groups).values, config.loss.advantage_clip)[
        samples, 0
    ].double()
    first = torch.zeros(len(samples), dtype=torch.float64)
    if level == 0:
        first[: max(1, round(FIRST * len(samples)))] = 1.0
    vectors: dict[str, tuple[Tensor, Tensor]] = {}
    for k, name in enumerate(data.names):
        centered = share[:, k] * (r[:, k] - 0.5)
        vectors[f"full:{name}"] = (share[:, k] * r[:, k], share[:, k] * (1 - r[:, k]))
        vectors[f"centered:{name}"] = (centered, -centered)
        known = torch.where(mask[:, k] > 0, r[:, k], 0.5)
        vectors[f"zero:{name}"] = (known / pairs, (1 - known) / pairs)
        vectors[f"first:{name}"] = (first * centered, -first * centered)
    vectors["sum"] = (r_sum / pairs, (1 - r_sum) / pairs)
    vectors["centered:sum"] = ((r_sum - 0.5) / pairs, -(r_sum - 0.5) / pairs)
    half = torch.full((len(samples),), 0.5 / pairs, dtype=torch.float64)
    vectors["common"] = (half, half)
    return list(vectors), torch.stack([torch.stack(pair) for pair in vectors.values()])
