"""First step of an evaluation: one picture per prompt and sample."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

import gradbalance as gb
from gradbalance.errors import InvalidArgumentError

from ..assembly import load_base
from ..config import Config
from ..embeddings import PromptEncoder
from ..figures import to_image
from ..first_rank import wait_for_all
from ..generator import MixedPrecision, SD3Generator
from ..progress import progress_bar
from ..prompts import Prompt
from ..sampling import sample_latents
from ..sections import ModelConfig, Solver
from .folder import EvaluationFolder
from .lora import LoRAWeights, applied, read_lora
from .specs import ModelSpec
from .work import Picture, batches, missing


@dataclass(frozen=True)
class Sampling:
    """What a picture depends on besides model, prompt and sample.

    Attributes:
        steps: Solver steps.
        solver: ``"euler"`` or ``"dpm++2m"``.
        guidance_scale: Classifier-free guidance with an empty negative prompt; 1 is none.
        seed: Seed of prompt 0, sample 0; see :meth:`~gradbalance_diffusers.evaluating.work.Picture.seed`.
        height: In pixels.
        width: In pixels.
        mixed_precision: Autocast of the network, ``"no"``, ``"bf16"`` or ``"fp16"``.
    """

    steps: int
    solver: Solver
    guidance_scale: float
    seed: int
    height: int
    width: int
    mixed_precision: MixedPrecision = "no"

    @classmethod
    def from_config(cls, config: Config) -> Sampling:
        """As training evaluates, without guidance."""
        evaluation, model = config.evaluation, config.model
        return cls(
            steps=evaluation.steps,
            solver=evaluation.solver,
            guidance_scale=1.0,
            seed=evaluation.seed,
            height=model.height,
            width=model.width,
            mixed_precision=config.run.mixed_precision,
        )


def load_generator(config: ModelConfig, *, mixed_precision: MixedPrecision = "no") -> SD3Generator:
    """The base model, without adapters.

    Args:
        config: The ``model`` section.
        mixed_precision: Autocast of forward passes, ``run.mixed_precision``.
    """
    pipeline = load_base(config, encoders_on_cpu=_encoders_wait(config))
    return SD3Generator(pipeline, max_sequence_length=config.max_sequence_length, mixed_precision=mixed_precision)


def generate(
    folder: EvaluationFolder,
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt],
    *,
    model: ModelConfig,
    sampling: Sampling,
    samples: int = 1,
    batch_size: int = 8,
    decode_batch_size: int = 4,
    ranks: gb.distributed.Ranks | None = None,
) -> None:
    """Write the pictures of every model that are not there yet.

    All models get the same noise for the same prompt and sample. The base model is loaded once and carries one LoRA
    after the other. Pictures are written one by one; what is there is not made again. Several ranks deal out the
    batches and return when all are done; the pictures are the same on any number of them.

    Args:
        folder: Where they go.
        specs: The models.
        prompts: The prompts, the same for all models.
        model: The base model.
        sampling: Solver, size, seed, and the guidance of models that name none.
        samples: Pictures per prompt.
        batch_size: Pictures per forward pass. It changes memory, speed, and the last bits of a picture.
        decode_batch_size: Pictures per pass of the VAE, likewise.
        ranks: Processes that share the work, all of which see the folder; None for all there are.

    Raises:
        InvalidArgumentError: A LoRA that does not fit or changes nothing.
        StateError: The folder holds other prompts, or pictures of a model that were made otherwise.
    """
    ranks = ranks or gb.distributed.Ranks("average")
    loras = {spec.name: read_lora(spec) for spec in specs}
    if ranks.rank == 0:
        folder.write_prompts(prompts)
        for spec in specs:
            settings = _settings(spec, loras[spec.name], model, sampling)
            folder.add_model(spec.name, settings, _notes(spec, loras[spec.name], model))
    wait_for_all(ranks)
    own = batches(len(prompts), samples, batch_size)[ranks.rank :: ranks.size]
    todo = {spec: missing(own, folder.pictures(spec.name)) for spec in specs}
    if any(todo.values()):
        _generate(folder, todo, loras, prompts, model, sampling, decode_batch_size)
    elif not ranks.several:
        print(f"All {len(prompts) * samples} pictures of {len(specs)} models are there already.")
    wait_for_all(ranks)


def _generate(
    folder: EvaluationFolder,
    todo: Mapping[ModelSpec, Sequence[Sequence[Picture]]],
    loras: Mapping[str, LoRAWeights | None],
    prompts: Sequence[Prompt],
    model: ModelConfig,
    sampling: Sampling,
    decode_batch_size: int,
) -> None:
    generator = load_generator(model, mixed_precision=sampling.mixed_precision)
    # Every prompt comes once a sample, so that keeping embeddings of thousands would only fill the memory.
    encoder = PromptEncoder(generator, limit=1)
    if _encoders_wait(model):
        encoder.offload()
    for spec, remaining in todo.items():
        if remaining:
            sampler = PictureSampler(generator, encoder, prompts, _own_guidance(spec, sampling), decode_batch_size)
            untouched = None if loras[spec.name] is None else sampler.first_step()
            with applied(generator.pipeline, loras[spec.name]):
                if untouched is not None:
                    change = relative_change(untouched, sampler.first_step(), spec.source)
                    print(f"{spec.name}: the LoRA moves the first denoising step by {change:.2%}.")
                _save_pictures(folder, spec.name, sampler, remaining)


class PictureSampler:
    """Makes the pictures of an evaluation with whatever LoRA the pipeline carries at the time.

    Args:
        generator: The model.
        encoder: Its text encoders.
        prompts: All prompts of the evaluation.
        sampling: How pictures are made.
        decode_batch_size: Pictures per pass of the VAE.
    """

    def __init__(
        self,
        generator: SD3Generator,
        encoder: PromptEncoder,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        decode_batch_size: int,
    ) -> None:
        self.generator, self.encoder, self.prompts = generator, encoder, prompts
        self.sampling, self.decode_batch_size = sampling, decode_batch_size
        self._negative = encoder.encode([""]) if sampling.guidance_scale != 1.0 else None

    def __call__(self, batch: Sequence[Picture]) -> Tensor:
        """The pictures of a batch, ``[B, 3, H, W]`` in [0, 1] on the CPU."""
        sampling = self.sampling
        latents = sample_latents(
            self.generator,
            self.encoder.encode([self.prompts[picture.prompt].text for picture in batch]),
            steps=sampling.steps,
            seeds=[picture.seed(sampling.seed, len(self.prompts)) for picture in batch],
            solver=sampling.solver,
            height=sampling.height,
            width=sampling.width,
            guidance_scale=sampling.guidance_scale,
            negative=self._negative,
        )
        return self.generator.decode(latents, batch_size=self.decode_batch_size).cpu()

    def first_step(self) -> Tensor:
        """What the network makes of pure noise and the first prompt: its estimate of the clean latents."""
        return sample_latents(
            self.generator,
            self.encoder.encode([self.prompts[0].text]),
            steps=1,
            seeds=[self.sampling.seed],
            solver="euler",
            height=self.sampling.height,
            width=self.sampling.width,
        )


def _save_pictures(
    folder: EvaluationFolder, name: str, sampler: PictureSampler, work: Sequence[Sequence[Picture]]
) -> None:
    with progress_bar(total=sum(map(len, work)), desc=f"{name}: pictures", dynamic_ncols=True) as progress:
        for batch in work:
            for picture, image in zip(batch, sampler(batch), strict=True):
                folder.save_image(name, picture, _png(image))
            progress.update(len(batch))


def relative_change(before: Tensor, after: Tensor, source: str) -> float:
    """Norm of the difference over the norm of ``before``.

    Raises:
        InvalidArgumentError: There is no difference at all, or the result is not finite: the LoRA ``source`` is not one
            that can be compared with the base.
    """
    if not bool(torch.isfinite(after).all()):
        raise InvalidArgumentError(
            f"The LoRA {source} must give finite pictures. It turns the first denoising step into NaN or Inf. Its "
            "training has failed, or it needs another --dtype."
        )
    change = float((after - before).norm() / before.norm())
    if change == 0.0:
        raise InvalidArgumentError(
            f"The LoRA {source} must change the model. Its output is that of the base model, bit for bit: its weights "
            "are zero (never trained?), or too small for this --dtype. Evaluate `base` instead."
        )
    return change


def _encoders_wait(config: ModelConfig) -> bool:
    """Whether text encoders are on the device only while they encode; giving them up is for trainings."""
    return config.text_encoders != "keep"


def _own_guidance(spec: ModelSpec, sampling: Sampling) -> Sampling:
    return sampling if spec.guidance is None else Sampling(**{**asdict(sampling), "guidance_scale": spec.guidance})


def _settings(spec: ModelSpec, lora: LoRAWeights | None, model: ModelConfig, sampling: Sampling) -> dict[str, Any]:
    """Everything that changes the pictures."""
    return {
        "model.path": model.path,
        "model.revision": model.revision,
        "model.variant": model.variant,
        "model.dtype": model.dtype,
        "model.load_t5": model.load_t5,
        "model.max_sequence_length": model.max_sequence_length,
        **{f"sampling.{key}": value for key, value in asdict(_own_guidance(spec, sampling)).items()},
        "lora.step": None if lora is None else lora.notes.get("step"),
        "lora.sha256": None if lora is None else lora.sha256(),
    }


def _notes(spec: ModelSpec, lora: LoRAWeights | None, model: ModelConfig) -> dict[str, Any]:
    """What else a reader of the manifest wants to know."""
    notes: dict[str, Any] = {
        "kind": spec.kind,
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
    }
    if lora is None:
        return notes
    trained_on = lora.notes.get("trained_on")
    if trained_on not in (None, model.path):
        warnings.warn(
            f"{spec.name}: {lora.source} was trained on {trained_on!r} and is evaluated on {model.path!r}.",
            UserWarning,
            stacklevel=3,
        )
    return {**notes, **lora.notes}


def _png(image: Tensor) -> bytes:
    stream = io.BytesIO()
    to_image(image).save(stream, "PNG")
    return stream.getvalue()
