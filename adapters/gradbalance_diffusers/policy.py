"""A Stable Diffusion 3 pipeline as a policy: LoRA that is trained, LoRA that samples, and the base as reference."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gradbalance.errors import InvalidArgumentError

from .embeddings import PromptEmbeddings
from .generator import MixedPrecision, SD3Generator
from .roles import AdapterRoles, Role, same_tensors

LORA_FILE = "pytorch_lora_weights.safetensors"
ATTENTION_PROJECTIONS = tuple(
    f"attn.{name}"
    for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v")
)


class SD3Policy(SD3Generator):
    """LoRA on the transformer of a :class:`~diffusers.StableDiffusion3Pipeline`, in three roles.

    ``default`` is trained, ``old`` samples the training images and is always frozen, ``reference`` is the base model.
    The policy starts in the role ``default``; ``with policy.role("old"): ...`` changes it for a block. LoRA parameters
    are float32 whatever the dtype of the base (DiffusionNFT, arXiv 2509.16117, section 3; see
    :class:`~gradbalance_diffusers.roles.AdapterRoles` for how roles and gradients go together).

    Args:
        pipeline: The pipeline, changed in place: everything in it is frozen and put in evaluation mode.
        rank: LoRA rank.
        alpha: LoRA alpha; the update is scaled by alpha / rank.
        target_modules: Endings of the names of the adapted linear layers. By default the eight projections of the
            joint attention; the second attention (``attn2``) of dual-attention blocks is left alone.
        init: ``"gaussian"`` or ``"kaiming"``, see :class:`~gradbalance_diffusers.roles.AdapterRoles`.
        seed: Seed of the LoRA initialization.
        max_sequence_length: T5 tokens per prompt; without a T5 encoder, the number of zero tokens in their place.
        gradient_checkpointing: Recompute transformer blocks during the backward to save memory.
        mixed_precision: Autocast of forward passes in every role: ``"no"``, ``"bf16"`` or ``"fp16"``, whose gradients
            need a loss scale.

    Attributes:
        pipeline: The pipeline.
        transformer: Its transformer.
        parameters: The trained parameters by name, sorted, float32. Collected once: an optimizer over them stays valid.
        old_parameters: The same names for the role ``old``.
        max_sequence_length: As given.

    Raises:
        InvalidArgumentError: Not an SD3 pipeline, an unsupported scheduler, adapters present, no layer matches.
    """

    def __init__(
        self,
        pipeline: StableDiffusion3Pipeline,
        *,
        rank: int = 32,
        alpha: float = 64,
        target_modules: Sequence[str] = ATTENTION_PROJECTIONS,
        init: Literal["gaussian", "kaiming"] = "gaussian",
        seed: int = 0,
        max_sequence_length: int = 256,
        gradient_checkpointing: bool = False,
        mixed_precision: MixedPrecision = "no",
    ) -> None:
        super().__init__(pipeline, max_sequence_length=max_sequence_length, mixed_precision=mixed_precision)
        self._roles = AdapterRoles(
            self.transformer, rank=rank, alpha=alpha, target_modules=target_modules, init=init, seed=seed
        )
        self.parameters = self._roles.parameters
        self.old_parameters = self._roles.old_parameters
        if gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing(self._roles.checkpointed)

    # ---------------------------------------------------------------------------------------------- roles

    @property
    def active_role(self) -> Role:
        """The role that the transformer is in now."""
        return self._roles.active

    def role(self, name: Role) -> contextlib.AbstractContextManager[None]:
        """Use role ``"default"``, ``"old"`` or ``"reference"`` inside a block. Nests; restores after errors too."""
        return self._roles.role(name)

    def verify_role(self) -> None:
        """Raise :class:`~gradbalance.errors.StateError` if something else switched, froze or cast the adapters."""
        self._roles.verify()

    def synchronize_old(self) -> None:
        """Old <- default."""
        self._roles.synchronize()

    def blend_old(self, decay: float) -> None:
        """Old <- decay * old + (1 - decay) * default, ``decay`` in [0, 1]; A and B factors are blended separately."""
        self._roles.blend(decay)

    # ------------------------------------------------------------------------------------ network

    def velocity(self, latents: Tensor, sigma: Tensor, embeddings: PromptEmbeddings) -> Tensor:
        r"""The network's velocity :math:`v(x_\sigma, \sigma, c)`, whose target is noise minus clean latents.

        A gradient flows to :attr:`parameters` in the role ``default`` only. The backward may happen in any role.

        Args:
            latents: Noisy latents ``[B, C, h, w]``.
            sigma: Noise levels ``[B]`` in (0, 1]; the network is given sigma times the number of training time steps.
            embeddings: Embeddings of B prompts.

        Returns:
            ``[B, C, h, w]`` float32.

        Raises:
            InvalidArgumentError: The batch sizes differ.
            StateError: Something else switched, froze or cast the adapters.
        """
        if sigma.shape != (len(latents),) or len(embeddings) != len(latents):
            raise InvalidArgumentError(
                "`latents` [B, C, h, w], `sigma` [B] and `embeddings` must have the same B. Found "
                f"{tuple(latents.shape)}, {tuple(sigma.shape)} and {len(embeddings)}."
            )
        self._roles.verify()
        embeddings = embeddings.to(latents.device, self.dtype)
        with self.autocast():
            prediction: Tensor = self.transformer(
                hidden_states=latents.to(self.dtype),
                timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
                encoder_hidden_states=embeddings.prompt_embeds,
                pooled_projections=embeddings.pooled,
                return_dict=False,
            )[0]
        return prediction.float()

    # ------------------------------------------------------------------------------------------------- files

    def lora_state_dict(self, role: Literal["default", "old"] = "default") -> dict[str, Tensor]:
        """A copy on the CPU of the LoRA tensors of ``role``, float32, with the names diffusers uses in files."""
        return {f"transformer.{name}": p.detach().cpu().clone() for name, p in self._adapter(role).items()}

    def save_lora(self, folder: str | PathLike[str], role: Literal["default", "old"] = "default") -> None:
        """Write ``pytorch_lora_weights.safetensors``, so that ``pipe.load_lora_weights(folder)`` gives the same images.

        Rank and alpha go into the file's metadata; without them diffusers would assume alpha = rank.
        """
        StableDiffusion3Pipeline.save_lora_weights(
            str(folder),
            transformer_lora_layers={name: p.detach().cpu() for name, p in self._adapter(role).items()},
            transformer_lora_adapter_metadata=self.transformer.peft_config[role].to_dict(),
            weight_name=LORA_FILE,
        )

    @torch.no_grad()
    def load_lora(self, folder: str | PathLike[str], role: Literal["default", "old"] = "default") -> None:
        """Copy the tensors written by :meth:`save_lora` into ``role``, bit for bit. The parameters stay trainable.

        Raises:
            InvalidArgumentError: No readable file, or its tensors are not those of this policy.
        """
        path = Path(folder) / LORA_FILE
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise InvalidArgumentError(f"`folder` must hold a readable {LORA_FILE}. Reading {path}: {error}") from error
        parameters = self._adapter(role)
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
        same_tensors(tensors, parameters, str(path))
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])

    def _adapter(self, role: str) -> dict[str, nn.Parameter]:
        adapters = {"default": self.parameters, "old": self.old_parameters}
        if role not in adapters:
            raise InvalidArgumentError(f"`role` must be one of {list(adapters)}, which have weights. Found {role!r}.")
        return adapters[role]
