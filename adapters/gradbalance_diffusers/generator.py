"""A Stable Diffusion 3 pipeline that gives clean latents and pictures, whatever adapters its transformer carries."""

from __future__ import annotations

import contextlib
from os import PathLike
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from torch import Tensor, nn

from gradbalance.errors import InvalidArgumentError

from .rewards.models import cannot_load, local_or_hub
from .scheduler import FlowDPMSolverMultistepScheduler, check_flow_scheduler, noise_levels

MixedPrecision = Literal["no", "bf16", "fp16"]
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def load_pipeline(
    path: str | PathLike[str],
    *,
    torch_dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    revision: str | None = None,
    variant: str | None = None,
    load_t5: bool = True,
    encoders_on_cpu: bool = False,
    local_files_only: bool = False,
) -> StableDiffusion3Pipeline:
    """A pipeline from a folder or the hub.

    Args:
        path: Folder or hub id.
        torch_dtype: Dtype of the model.
        device: Where to put the pipeline; left on the CPU if None.
        revision: Branch, tag or commit on the hub.
        variant: Variant of the weight files, such as ``"fp16"``.
        load_t5: Load the T5 encoder if the model has one; False saves its memory, zeros take its place.
        encoders_on_cpu: Leave the text encoders on the CPU.
        local_files_only: Never use the network.

    Raises:
        InvalidArgumentError: Nothing there that can be loaded.
    """
    place, source = local_or_hub(path), {"revision": revision, "local_files_only": local_files_only}
    try:
        index = StableDiffusion3Pipeline.load_config(place, **source)
        without_t5 = {}
        if not load_t5 or index.get("text_encoder_3", [None, None])[0] is None:
            without_t5 = {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            place, dtype=torch_dtype, variant=variant, **source, **without_t5
        )
    except OSError as error:  # the hub's errors are OSErrors
        raise cannot_load("model.path", path, "a diffusers pipeline", error) from error
    for name, part in pipeline.components.items():
        if device is not None and isinstance(part, nn.Module) and not (encoders_on_cpu and name in TEXT_ENCODERS):
            part.to(device)
    return pipeline


class SD3Generator:
    """Samples and decodes with a :class:`~diffusers.StableDiffusion3Pipeline`, whose weights stay as they are.

    Args:
        pipeline: The pipeline, changed in place: everything in it is frozen and put in evaluation mode.
        max_sequence_length: T5 tokens per prompt; without a T5 encoder, the number of zero tokens in their place.
        mixed_precision: Autocast of the transformer's forward passes: ``"no"``, ``"bf16"`` or ``"fp16"``. The VAE
            always computes in its own dtype.

    Attributes:
        pipeline: The pipeline.
        transformer: Its transformer.
        max_sequence_length: As given.
        mixed_precision: As given.

    Raises:
        InvalidArgumentError: Not an SD3 pipeline, or an unsupported scheduler.
    """

    def __init__(
        self,
        pipeline: StableDiffusion3Pipeline,
        *,
        max_sequence_length: int = 256,
        mixed_precision: MixedPrecision = "no",
    ) -> None:
        if not isinstance(pipeline, StableDiffusion3Pipeline):
            raise InvalidArgumentError(
                f"`pipeline` must be a StableDiffusion3Pipeline. Found {type(pipeline).__name__}. "
                "Other models need a policy class of their own."
            )
        check_flow_scheduler(pipeline.scheduler)
        self.pipeline = pipeline
        self.transformer: nn.Module = pipeline.transformer
        self.max_sequence_length = max_sequence_length
        self.mixed_precision = mixed_precision
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        self._samplers: dict[str, StableDiffusion3Pipeline] = {}

    def verify_role(self) -> None:
        """Raise if the adapters are not as they should be; asked before sampling. Without roles, any are right."""

    @property
    def device(self) -> torch.device:
        """Device of the transformer."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base model (LoRA is float32)."""
        dtype: torch.dtype = self.transformer.dtype
        return dtype

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward passes of the transformer, in training and in sampling alike."""
        if self.mixed_precision == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_AUTOCAST_DTYPES[self.mixed_precision])

    @torch.no_grad()
    def decode(self, latents: Tensor, *, batch_size: int = 4) -> Tensor:
        """Images ``[B, 3, H, W]`` float32 in [0, 1] of clean latents ``[B, C, h, w]``, ``batch_size`` at a time."""
        vae = self.pipeline.vae
        shift = vae.config.shift_factor or 0.0
        images = []
        for chunk in latents.split(batch_size):
            scaled = (chunk / vae.config.scaling_factor + shift).to(device=vae.device, dtype=vae.dtype)
            images.append((vae.decode(scaled, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1))
        return torch.cat(images)

    def noise_levels(self, steps: int) -> Tensor:
        """Noise levels ``[steps + 1]`` of sampling, float32, strictly decreasing, the last one 0."""
        return noise_levels(self.pipeline.scheduler, steps)

    def sampler(self, solver: str) -> StableDiffusion3Pipeline:
        """A pipeline that shares this policy's transformer and VAE and has the scheduler of ``solver``.

        It has no text encoders (embeddings are passed in), so these can be offloaded, and no progress bar.
        """
        if solver not in self._samplers:
            euler = FlowMatchEulerDiscreteScheduler.from_config(self.pipeline.scheduler.config)
            schedulers = {"euler": euler, "dpm++2m": FlowDPMSolverMultistepScheduler.from_euler(euler)}
            if solver not in schedulers:
                raise InvalidArgumentError(f"`solver` must be one of {list(schedulers)}. Found {solver!r}.")
            texts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
            sampler = StableDiffusion3Pipeline(
                transformer=self.transformer,
                vae=self.pipeline.vae,
                scheduler=schedulers[solver],
                **dict.fromkeys(texts),
            )
            sampler.set_progress_bar_config(disable=True)
            self._samplers[solver] = sampler
        return self._samplers[solver]
