"""One optimizer step on the samples of an epoch: the cycle of micro-batches, the balance, and what follows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import gradbalance as gb

from .advantages import Advantages
from .balance import conflict_meter, make_balancer
from .config import Config
from .ema import WeightEMA
from .learning_rate import learning_rate_factor
from .nft import interpolate_noise, kl_term, nft_terms
from .policy import SD3Policy
from .progress import progress_bar
from .rollout import Rollout
from .stages import Stage
from .timesteps import NoiseDraws


@dataclass(frozen=True)
class EpochData:
    """What the optimizer steps of one epoch need: S samples of this rank, T noise levels per sample, K objectives.

    Attributes:
        rollout: The scored samples, with their clean latents ``[S, C, h, w]``.
        names: K names of what is balanced.
        advantages: Per-reward advantages ``[S, K]`` with their mask.
        r: Optimality ``[S, K]`` in [0, 1].
        draws: Noise levels ``[S, T]``, and the noise at each.
    """

    rollout: Rollout
    names: list[str]
    advantages: Advantages
    r: Tensor
    draws: NoiseDraws


@dataclass(frozen=True)
class StepResult:
    """Facts about one optimizer step.

    Attributes:
        info: The balance.
        loss: Mean of (L+ + L-)/2 over the step's (sample, level) pairs.
        kl: Mean square distance of the velocity to the reference's; 0 if its weight is 0.
        grad_norm: Norm of the balanced gradient before clipping; NaN if the step was skipped.
        lr: Learning rate of the step.
        overflows: How often the step was repeated with a lower loss scale (fp16).
        loss_scale: Loss scale of the step (fp16), else None.
    """

    info: gb.BalanceInfo
    loss: float
    kl: float
    grad_norm: float
    lr: float
    overflows: int = 0
    loss_scale: float | None = None


class PolicyUpdate:
    """Takes optimizer steps; owns the balanced optimizer, the learning rate, the weight average and the loss scale.

    With ``run.mixed_precision: fp16`` losses carry the scale of a :class:`torch.amp.GradScaler`. Where gradients
    overflow, the step is repeated with the lower scale: it costs a pass over the samples, and not the samples.

    Args:
        config: The whole configuration.
        policy: The policy that is trained.
        optimizer: A torch optimizer over ``policy.parameters``.
        total_steps: Optimizer steps of the whole run, for a cosine schedule.
        ranks: That train together, each on its own samples, in the mode ``"average"``; None for all there are. The
            parameters must start equal on all of them.
    """

    def __init__(
        self,
        config: Config,
        policy: SD3Policy,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        ranks: gb.distributed.Ranks | None = None,
    ) -> None:
        self.config, self.policy, self.inner_optimizer = config, policy, optimizer
        self.ranks = ranks or gb.distributed.Ranks("average")
        self.ema = WeightEMA(policy.parameters, decay=config.ema.decay, warmup=config.ema.warmup)
        self.scheduler = LambdaLR(optimizer, learning_rate_factor(config.optimizer, total_steps))
        fp16 = config.run.mixed_precision == "fp16"
        self.scaler = torch.amp.GradScaler(policy.device.type) if fp16 else None

    def enter_stage(self, stage: Stage) -> None:
        """A balancer and a conflict meter of the stage's own, around the same inner optimizer."""
        self.meter = conflict_meter(self.config.balance)
        self.optimizer = gb.BalancedOptimizer(
            self.inner_optimizer,
            make_balancer(self.config.balance, stage.method, stage.rewards),
            module=self.policy.transformer,
            collector=self.config.balance.collector,
            scaler=self.scaler,
            on_nonfinite=self.config.optimizer.on_nonfinite,
            ranks=self.ranks,
            on_rows=None if self.meter is None else self._measure,
        )

    def _measure(self, blocks: Sequence[Tensor], names: tuple[str, ...]) -> None:
        """Every rank has the same averaged rows, and one keeps the sums."""
        if self.meter is not None and self.ranks.rank == 0:
            self.meter.update(blocks, names)

    def step(self, data: EpochData, samples: Tensor) -> StepResult:
        """One optimizer step on ``samples`` of ``data``; a cycle of micro-batches over all (sample, level) pairs.

        On several ranks each has data and samples of its own, possibly none in this step, and the step is that of all.

        Raises:
            NonFiniteError: NaN or Inf in a loss or a gradient that no lower loss scale can mend, unless
                ``optimizer.on_nonfinite`` is ``"skip"``.
        """
        overflows = 0
        while True:
            loss, kl = self._backward(data, samples)
            result = self._finish(loss, kl, overflows)
            if result is not None:
                return result
            overflows += 1

    def _backward(self, data: EpochData, samples: Tensor) -> tuple[float, float]:
        """Gradients of all pairs into the optimizer's cycle; returns the mean denoising loss and the mean KL term."""
        levels, world = data.draws.sigma.shape[1], self.ranks.size
        micro = self.config.optimizer.micro_batch_size or max(1, len(samples))
        batches = [(chunk, level) for level in range(levels) for chunk in samples.split(micro) if len(chunk)]
        mask, counts, pairs = self._counted(data, samples)
        share = 1.0
        if not batches:
            # The other ranks have samples. This one takes part with one that counts for nothing.
            share, batches, mask = 0.0, [(torch.tensor([0]), 0)], torch.zeros_like(mask)
        # Sums stay on the device: reading them on every micro-batch would stall it.
        sums = torch.zeros(2, device=self.policy.device)
        for chunk, level in progress_bar(batches, desc="optimizing", leave=False, disable=len(batches) < 4):
            positive, negative, kl = (
                None if term is None else share * term for term in self._terms(data, chunk, level)
            )
            loss = gb.AffineLoss.interpolate(
                self._scaled(positive),
                self._scaled(negative),
                data.r[chunk],
                mask[chunk],
                counts=counts,
                center=self.config.loss.center,
                batch_size=pairs,
                names=data.names,
                world_size=world,
            )
            outside = [] if loss.common is None else [loss.common]
            if kl is not None:
                outside.append(self._scaled(self.config.loss.kl_weight * kl.sum() * world / pairs))
                sums[1] += kl.detach().sum() / pairs
            self.optimizer.backward(loss, extra_loss=sum(outside) if outside else None)
            sums[0] += (positive + negative).detach().sum() / (2 * pairs)
        denoising, divergence = gb.distributed.gather_samples(sums[None], self.ranks.group).sum(dim=0).tolist()
        return denoising, divergence

    def _counted(self, data: EpochData, samples: Tensor) -> tuple[Tensor, list[int], int]:
        """Which rewards count for which sample ``[S, K]``; and over all ranks, pairs of each reward, and of the step.

        Where no sample of a reward is better than another, r is 1/2 everywhere: its row would be the pull to the old
        policy, or rounding before the first step, and the balancer would scale that up to a full objective. So such a
        reward counts for none.
        """
        mask, levels = data.advantages.mask, data.draws.sigma.shape[1]
        signal = mask & (data.advantages.values != 0)
        every = torch.cat([mask, signal, torch.ones(len(mask), 1, dtype=torch.bool)], dim=1)[samples]
        *counts, pairs = (gb.distributed.global_counts(every, self.ranks.group) * levels).tolist()
        counts, signals = counts[: mask.shape[1]], counts[mask.shape[1] :]
        return mask & (torch.tensor(signals) > 0), counts, pairs

    def _finish(self, loss: float, kl: float, overflows: int) -> StepResult | None:
        """Balance, clip and step; None if gradients overflowed and the cycle is to be repeated."""
        lr = self.scheduler.get_last_lr()[0]
        info = self.optimizer.balance()
        if info.skipped:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return StepResult(info, loss, kl, math.nan, lr)
        scale = None if self.scaler is None else self.scaler.get_scale()
        if self.scaler is not None:
            self._require_finite(loss, scale)
            self.scaler.unscale_(self.optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(
            list(self.policy.parameters.values()), self.config.optimizer.max_grad_norm or float("inf")
        )
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler is not None and self.scaler.get_scale() < scale:
            return None
        self.scheduler.step()
        self.ema.update()
        return StepResult(info, loss, kl, float(grad_norm), lr, overflows, scale)

    def _require_finite(self, loss: float, scale: float) -> None:
        if not math.isfinite(loss) or scale < 1.0:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the loss scale fell to {scale:g}"
            raise gb.NonFiniteError(
                f"Losses and gradients must be finite in `run.mixed_precision: fp16`. Found that {what}, which no "
                "lower loss scale mends: the network itself overflows. Use bf16, or lower optimizer.lr."
            )

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scaler is None else self.scaler.scale(tensor)

    def _terms(self, data: EpochData, chunk: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """L+ ``[b]``, L- ``[b]``, KL term ``[b]`` (None if its weight is 0) of samples ``chunk`` at one level."""
        loss, device = self.config.loss, self.policy.device
        x0 = data.rollout.latents[chunk].to(device)
        sigma = data.draws.sigma[chunk, level].to(device)
        noise = data.draws.noise(chunk, level, x0.shape[1:]).to(device)
        embeddings = data.rollout.embeddings.index(chunk).to(device)
        x_t = interpolate_noise(x0, noise, sigma)
        with torch.no_grad(), self.policy.role("old"):
            velocity_old = self.policy.velocity(x_t, sigma, embeddings)
        if loss.kl_weight:
            with torch.no_grad(), self.policy.role("reference"):
                velocity_reference = self.policy.velocity(x_t, sigma, embeddings)
        velocity = self.policy.velocity(x_t, sigma, embeddings)
        positive, negative = nft_terms(
            x0,
            noise,
            sigma,
            velocity,
            velocity_old,
            guidance_beta=loss.guidance_beta,
            advantage_clip=loss.advantage_clip,
        )
        return positive, negative, kl_term(velocity, velocity_reference) if loss.kl_weight else None

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer with its balancer, the schedule, the average, the loss scale, the conflict meter."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "meter": None if self.meter is None else self.meter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, in the stage that it was taken in."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.ema.load_state_dict(state["ema"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.meter is not None and state["meter"] is not None:
            self.meter.load_state_dict(state["meter"])
