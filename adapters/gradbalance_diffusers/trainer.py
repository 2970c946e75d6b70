"""DiffusionNFT on several rewards at once, balanced (paper arXiv 2605.06507, sections 2 and 3).

One epoch: sample with the old policy, score, turn scores into per-reward advantages, take balanced optimizer steps,
move the old policy towards the trained one. All randomness of an epoch is a pure function of (seed, epoch).
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gradbalance as gb
from gradbalance.errors import InvalidArgumentError

from .advantages import group_advantages
from .balance import WEIGHTED_SUM, weighted_sum
from .checkpoint import CheckpointState, latest_checkpoint, load_checkpoint, save_checkpoint
from .config import Config
from .embeddings import PromptEncoder
from .evaluation import Evaluation, evaluate
from .first_rank import SilentFolder, copy_from_first_rank, from_first_rank
from .nft import optimality
from .old_policy import OldPolicySchedule
from .policy import SD3Policy
from .progress import progress_bar
from .prompts import Prompt, StratifiedSampler
from .report import write_report
from .rewards.base import RewardSet, RewardTable
from .rollout import roll_out
from .run_folder import RunFolder
from .share import Share
from .stages import Stage, plan_stages, stage_at
from .timesteps import TimestepSampler, seeded_generator
from .trackers import Trackers
from .training_log import evaluation_row, save_evaluation, training_row
from .update import EpochData, PolicyUpdate


class NFTTrainer:
    """The training loop. Everything it works with is handed in; it owns the order of things and the state to resume.

    Args:
        config: The whole configuration.
        policy: LoRA policy with its old and reference roles.
        rewards: What scores a sample.
        prompts: Training prompts by source.
        evaluation_prompts: Held-out prompts, always sampled with the same seeds.
        optimizer: A torch optimizer over ``policy.parameters``; the trainer wraps it in
            :class:`gradbalance.BalancedOptimizer`.
        folder: Where metrics, evaluations and checkpoints go; of rank 0, if there are several.
        ranks: That train together, each on its share of the samples of every epoch; None for all there are.

    Raises:
        InvalidArgumentError: Fewer samples in an epoch than ranks.
    """

    def __init__(
        self,
        config: Config,
        *,
        policy: SD3Policy,
        rewards: RewardSet,
        prompts: Mapping[str, Sequence[Prompt]],
        evaluation_prompts: Sequence[Prompt],
        optimizer: torch.optim.Optimizer,
        folder: RunFolder | SilentFolder,
        ranks: gb.distributed.Ranks | None = None,
    ) -> None:
        self.ranks = ranks or gb.distributed.Ranks("average")
        self.config, self.policy, self.rewards, self.folder = config, policy, rewards, folder
        self.prompts, self.evaluation_prompts = prompts, list(evaluation_prompts)
        self.encoder = PromptEncoder(policy, limit=config.model.cached_prompts)
        if config.sampling.guidance_scale != 1.0:
            warnings.warn(
                f"`sampling.guidance_scale` is {config.sampling.guidance_scale}: DiffusionNFT trains without guidance, "
                "which is known to slow it down or to collapse it. Use 1.0 unless that is the study.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.stages = plan_stages(config, rewards.names)
        self.epochs = self.stages[-1].last
        self.old_schedule = OldPolicySchedule(**vars(config.old_policy))
        self.timesteps = TimestepSampler.from_config(policy, config.timesteps, config.sampling.steps)
        total_steps = self.epochs * config.optimizer.steps_per_epoch
        self.update = PolicyUpdate(config, policy, optimizer, total_steps=total_steps, ranks=self.ranks)
        self.size = (config.model.height, config.model.width)
        samples = config.prompts.groups_per_epoch * config.prompts.images_per_prompt
        if samples < self.ranks.size:
            raise InvalidArgumentError(
                f"An epoch must have a picture for every process. Found {samples} pictures for {self.ranks.size} "
                "processes. Start fewer of them, or raise prompts.groups_per_epoch."
            )
        self.epoch = self.step = 0
        self.base_evaluation: Evaluation | None = None
        self._trackers = Trackers([], folder.path, config, step=0)
        self._enter_stage(0)

    # ---------------------------------------------------------------------------------------------- the loop

    def fit(self) -> None:
        """Train from the current epoch to the last, evaluating, logging and saving on the way."""
        self._place_encoders()
        trackers = self.config.run.trackers if isinstance(self.folder, RunFolder) else []
        self._trackers = Trackers(trackers, self.folder.path, self.config, self.step)
        with contextlib.closing(self._trackers):
            self._fit()

    def _fit(self) -> None:
        progress = progress_bar(total=self.epochs, initial=self.epoch, desc="epochs", dynamic_ncols=True)
        while self.epoch < self.epochs:
            if self.epoch % self.config.evaluation.every == 0:
                self.evaluate()
            self._enter_stage(self.epoch)
            table = self.train_epoch(self.epoch)
            self.epoch += 1
            if self.epoch % self.config.run.checkpoint_every == 0 or self.epoch == self.epochs:
                self.save_checkpoint()
            if self.epoch % self.config.run.report_every == 0 and self.epoch < self.epochs:
                self._write_report()
            progress.set_postfix({name: f"{mean:.3f}" for name, mean in table.means().items()}, refresh=False)
            progress.update()
        self.evaluate()
        self._write_report()
        progress.close()

    def train_epoch(self, epoch: int) -> RewardTable:
        """One epoch of DiffusionNFT with a balanced direction; returns the rewards of its samples."""
        started = time.perf_counter()
        seed = self.config.run.seed
        prompts = self.sampler.samples(epoch)
        groups = torch.arange(len(prompts)) // self.config.prompts.images_per_prompt
        seeds = np.random.SeedSequence([seed, epoch]).generate_state(len(prompts)).tolist()
        order = torch.randperm(self.config.prompts.groups_per_epoch, generator=seeded_generator(seed, epoch, 1))
        parts = order.tensor_split(self.config.optimizer.steps_per_epoch)
        steps = [torch.isin(groups, part).nonzero().flatten() for part in parts]
        share = Share(torch.cat(steps), self.ranks)
        own = share.own

        with self.policy.role("old"):
            rollout = roll_out(
                self.policy,
                self.encoder,
                self.rewards,
                [prompts[i] for i in own.tolist()],
                [seeds[i] for i in own.tolist()],
                self.config.sampling,
                size=self.size,
            )
        rewards = share.gather_table(rollout.rewards, self.rewards.names)
        sampled = time.perf_counter()

        names, values, mask = self._objectives(rewards)
        loss = self.config.loss
        advantages = group_advantages(values, mask, groups, std=loss.advantage_std, eps=loss.advantage_epsilon)
        if loss.missing == "zero":
            advantages = advantages.counting_missing()
        r = optimality(advantages.values, loss.advantage_clip)
        draws = self.timesteps.draw(groups, (seed, epoch, 0))
        data = EpochData(rollout, names, advantages.index(own), r[own], draws.index(own))

        for samples in steps:
            result = self.update.step(data, torch.isin(own, samples).nonzero().flatten())
            self.step += 1
            self._log(
                training_row(
                    epoch=epoch,
                    step=self.step,
                    stage=self.stage.name,
                    rewards=rewards,
                    advantages=advantages,
                    result=result,
                    old_decay=self.old_schedule(self.step),
                    meter=self.update.meter,
                )
            )
        self.policy.blend_old(self.old_schedule(self.step))
        self.folder.log_timing(
            {"epoch": epoch, "sampling": sampled - started, "training": time.perf_counter() - sampled}
        )
        return rewards

    def _write_report(self) -> None:
        if isinstance(self.folder, RunFolder):
            write_report(self.folder.path)

    def _log(self, row: Mapping[str, Any]) -> None:
        self.folder.log(row)
        self._trackers.log(row)

    def _objectives(self, table: RewardTable) -> tuple[list[str], Tensor, Tensor]:
        """Names, values ``[B, K]`` and mask of what is balanced in this stage."""
        chosen = table.select(self.stage.rewards)
        if self.stage.method == WEIGHTED_SUM:
            return ["sum"], *weighted_sum(chosen, self.config.balance.reward_weights)
        return list(chosen.names), chosen.values, chosen.mask

    def _enter_stage(self, epoch: int) -> None:
        """At the first epoch of a stage: its prompts, and a balancer of its own around the same inner optimizer."""
        stage = stage_at(self.stages, epoch)
        if getattr(self, "stage", None) == stage:
            return
        self.stage = stage
        self.sampler = self._sampler(stage)
        self.update.enter_stage(stage)

    def _sampler(self, stage: Stage) -> StratifiedSampler:
        return StratifiedSampler(
            self.prompts,
            mix=stage.mix,
            groups_per_epoch=self.config.prompts.groups_per_epoch,
            images_per_prompt=self.config.prompts.images_per_prompt,
            seed=self.config.run.seed,
        )

    def _place_encoders(self) -> None:
        """Send the text encoders where they wait, or encode every prompt that the run will draw and drop them."""
        if self.config.model.text_encoders == "offload":
            self.encoder.offload()
        if self.config.model.text_encoders == "drop":
            drawn = [
                prompt
                for stage in self.stages
                for epoch in range(max(stage.first, self.epoch), stage.last)
                for prompt in self._sampler(stage).epoch(epoch)
            ]
            unconditional = [""] if self.config.sampling.guidance_scale != 1.0 else []
            self.encoder.drop([*(prompt.text for prompt in [*self.evaluation_prompts, *drawn]), *unconditional])

    # ------------------------------------------------------------------------------------ evaluation and state

    def evaluate(self) -> Evaluation:
        """Score the EMA weights on the held-out prompts, and compare with the untrained policy."""
        with self.update.ema.applied():
            result = evaluate(
                self.policy,
                self.encoder,
                self.rewards,
                self.evaluation_prompts,
                self.config.evaluation,
                self.config.sampling,
                size=self.size,
                epoch=self.epoch,
                ranks=self.ranks,
            )
        if self.base_evaluation is None:
            self.base_evaluation = result
        save_evaluation(self.folder, result)
        self._log(evaluation_row(result, self.base_evaluation, step=self.step))
        return result

    def save_checkpoint(self) -> None:
        """Write everything that a continued run needs, whole or not at all. It fits any number of ranks.

        Rank 0 writes; the others go on until they need it again.
        """
        if isinstance(self.folder, SilentFolder):
            return
        values = {
            "epoch": self.epoch,
            **self.update.state_dict(),
            "position": self.folder.position(),
            # This package draws from generators of its own; rewards of others may use the global ones. Those of the
            # other ranks would fit no other number of ranks.
            "random": {
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "python": random.getstate(),
            },
        }
        save_checkpoint(
            self.folder.checkpoints,
            self.step,
            CheckpointState(values=values, config=self.config.frozen_values()),
            save_lora=self.policy.save_lora,
            keep=self.config.run.keep_checkpoints,
        )

    def resume(self) -> None:
        """Continue from the newest whole checkpoint of the run folder, or from the start if it has none yet.

        Logs are cut back to the checkpoint, so what follows is what an unbroken run would have written: on a CPU, bit
        for bit (on several ranks, if the number of ranks has not changed).

        Rank 0 reads the checkpoint and sends it to the others, so that no disk has to be common.

        Raises:
            StateError: The checkpoint is damaged or from another configuration.
        """
        stored = None if isinstance(self.folder, SilentFolder) else self._read_newest(self.folder)
        # All but the sums of the conflict meter, which are the largest part and rank 0's own.
        sent = from_first_rank(None if stored is None else {**stored, "meter": None}, self.ranks)
        values = stored or sent
        if values is None:
            return
        self.epoch, self.step = values["epoch"], values["step"]
        self._enter_stage(max(0, self.epoch - 1))
        copy_from_first_rank((*self.policy.parameters.values(), *self.policy.old_parameters.values()), self.ranks)
        self.update.load_state_dict(values)
        torch.set_rng_state(values["random"]["torch"])
        np.random.set_state(values["random"]["numpy"])
        random.setstate(values["random"]["python"])

    def _read_newest(self, folder: RunFolder) -> dict[str, Any] | None:
        """Values of the newest whole checkpoint, whose LoRA weights are loaded at once; None if there is none."""
        newest = latest_checkpoint(folder.checkpoints)
        if newest is None:
            folder.rewind(dict.fromkeys(folder.position(), 0))
            return None
        checkpoint = load_checkpoint(newest, config=self.config.frozen_values())
        for role in ("default", "old"):
            self.policy.load_lora(checkpoint.lora[role], role)
        folder.rewind(checkpoint.values["position"])
        base = folder.load_evaluation(0)
        self.base_evaluation = None if base is None else Evaluation.from_json(base)
        return {**checkpoint.values, "step": checkpoint.step}
