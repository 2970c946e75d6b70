"""Stages 2 and 3 of pre-training: transformer and text encoders by flow matching."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, distributed
from tqdm import tqdm

from gradbalance_diffusers.tiny.data import WRONG_SHARES, wrong_caption
from gradbalance_diffusers.tiny.models import SHIFT
from gradbalance_diffusers.tiny.prompts import Row
from gradbalance_diffusers.tiny.train_vae import warmup_cosine

BATCH = 64
EMA_DECAY = 0.995
TRAINED = ("transformer", "text_encoder", "text_encoder_2")
WARMUP = 100
T5_LENGTH = 256
"""Default `max_sequence_length` of the pipeline."""


@dataclass(frozen=True)
class Stage:
    """A stretch of training with its own schedule.

    Attributes:
        name: Label of the progress bar.
        start: Steps taken before the stage.
        steps: Steps of the stage.
        rate: Peak learning rate; it warms up linearly over `WARMUP` steps and falls on a cosine.
        wrong_captions: Whether captions are wrong in the shares of `WRONG_SHARES`.
        placeholder_share: Share of the batches that carry the placeholder of a missing T5 encoder, zeros of the
            pipeline's default length. They cost four times as much.
    """

    name: str
    start: int
    steps: int
    rate: float
    wrong_captions: bool = False
    placeholder_share: float = 0.0


class FlowTrainer:
    r"""Trains transformer and both text encoders of a pipeline by flow matching, and keeps an average of their weights.

    With the clean latent $x_0$, Gaussian noise $\epsilon$ and $x_s = (1 - s) x_0 + s \epsilon$ it minimizes
    $\| v_\theta(x_s, s) - (\epsilon - x_0) \|^2$. Noise levels are those of SD3: $s = 3u / (1 + 2u)$ with a
    logit-normal u. The shift decides whether digits bind to the prompt at all: which digit is drawn is settled at s >
    0.8.

    Args:
        pipeline: Pipeline whose parts are trained in place.
        rows: Prompt rows of the pictures.
        latents: Normalized latents, (n, 4, 16, 16).
        seed: Seed of batches, noise levels, noise and wrong captions.
    """

    def __init__(self, pipeline: StableDiffusion3Pipeline, rows: list[Row], latents: Tensor, seed: int = 0) -> None:
        self.pipeline, self.latents = pipeline, latents
        self.right = _tokens(pipeline, [row["prompt"] for row in rows])
        rng = random.Random(seed)
        self.wrong = _tokens(pipeline, [wrong_caption(row, rng) for row in rows])
        self.wrong_share = torch.tensor([WRONG_SHARES[row["source"]] for row in rows])
        self.parts = {name: getattr(pipeline, name).train() for name in TRAINED}
        self.parameters = [p for part in self.parts.values() for p in part.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        joined = distributed.is_available() and distributed.is_initialized()
        self.rank, self.workers = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)

    def train(self, stage: Stage, checkpoint: Path, every: int, report: Callable[[int], None]) -> None:
        """Takes the steps of a stage that are not yet taken, from its checkpoint if there is one.

        Args:
            stage: Schedule.
            checkpoint: File the state of the training is written to, and read from at the start if it exists.
            every: Steps between two reports and checkpoints; there is a checkpoint at the end of the stage in any case.
            report: Called with the number of steps taken, while the averaged weights are in the pipeline.
        """
        if checkpoint.exists():
            self.load(checkpoint)
        start, end = stage.start, stage.start + stage.steps
        progress = tqdm(total=end, initial=self.step, desc=stage.name, mininterval=10, disable=self.rank > 0)
        while self.step < end:
            self.optimizer.param_groups[0]["lr"] = stage.rate * warmup_cosine(self.step - start, stage.steps, WARMUP)
            loss = self._update(stage)
            progress.update()
            if self.step % 20 == 0:
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if self.rank == 0 and (self.step % every == 0 or self.step == end):
                self.save(checkpoint)
                self.swap_average()
                report(self.step)
                self.swap_average()
        progress.close()

    def swap_average(self) -> None:
        """Exchanges the weights of the pipeline with their average."""
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=True):
                kept = parameter.clone()
                parameter.copy_(average)
                average.copy_(kept)

    def save(self, path: Path) -> None:
        """Writes weights, average, optimizer and generator to a file."""
        state = {
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
        }
        aside = path.with_suffix(".part")
        torch.save(state, aside)
        aside.replace(path)

    def load(self, path: Path) -> None:
        """Continues from a file written by `save`."""
        state = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step = state["step"]

    def _update(self, stage: Stage) -> float:
        loss = self._loss(stage)
        self.optimizer.zero_grad()
        loss.backward()
        self._share_gradients()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - decay)
        return loss.item()

    def _share_gradients(self) -> None:
        if self.workers == 1:
            return
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        distributed.all_reduce(flat)
        flat /= self.workers
        for p, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad.copy_(part.view_as(p))

    def _loss(self, stage: Stage) -> Tensor:
        pick = torch.randint(len(self.latents), (BATCH,), generator=self.generator)
        wrong = torch.rand(BATCH, generator=self.generator) < self.wrong_share[pick] * stage.wrong_captions
        u = torch.randn(BATCH, generator=self.generator).sigmoid()
        noise = torch.randn((BATCH, *self.latents.shape[1:]), generator=self.generator)
        # Every worker draws the whole batch from the same generator and takes its part.
        pick, wrong, u, noise = (whole[self.rank :: self.workers] for whole in (pick, wrong, u, noise))
        clean = self.latents[pick]
        tokens = torch.where(wrong[:, None], self.wrong[pick], self.right[pick])
        level = SHIFT * u / (1 + (SHIFT - 1) * u)
        s = level.view(-1, 1, 1, 1)
        first = self.parts["text_encoder"](tokens, output_hidden_states=True)
        second = self.parts["text_encoder_2"](tokens, output_hidden_states=True)
        # hidden_states[-2] is what the pipeline takes.
        context = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        if stage.placeholder_share and torch.rand((), generator=self.generator) < stage.placeholder_share:
            context = torch.cat([context, context.new_zeros(len(context), T5_LENGTH, context.shape[-1])], dim=1)
        velocity = self.parts["transformer"](
            hidden_states=(1 - s) * clean + s * noise,
            timestep=1000 * level,
            encoder_hidden_states=context,
            pooled_projections=torch.cat([first.text_embeds, second.text_embeds], dim=-1),
            return_dict=False,
        )[0]
        return (velocity - (noise - clean)).square().mean()


def _tokens(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> Tensor:
    tokenizer = pipeline.tokenizer
    length = tokenizer.model_max_length
    return tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
