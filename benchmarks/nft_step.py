"""The training part of a DiffusionNFT step on an SD3 transformer with LoRA, plain or balanced."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Literal

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

import gradbalance as gb
from gradbalance_diffusers.nft import interpolate_noise, kl_term, nft_terms
from gradbalance_diffusers.roles import AdapterRoles

RANK = 32
KL_WEIGHT = 1e-4
LATENT, CHANNELS, TEXT_TOKENS, TEXT_WIDTH = 20, 16, 32, 256
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class TrainingStep:
    """A transformer with the roles default, old and reference, and one fixed batch.

    Args:
        layers: Blocks of the transformer, at least 2: the last one has no text stream to adapt.
        heads: Attention heads of width 48.
        batch: Samples B.
    """

    def __init__(self, *, layers: int, heads: int, batch: int) -> None:
        torch.manual_seed(0)
        self.transformer = SD3Transformer2DModel(
            sample_size=LATENT,
            patch_size=2,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=layers,
            attention_head_dim=48,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            caption_projection_dim=48 * heads,
            pooled_projection_dim=TEXT_WIDTH,
            pos_embed_max_size=LATENT,
            qk_norm="rms_norm",
        )
        self.roles = AdapterRoles(self.transformer, rank=RANK, alpha=2 * RANK, target_modules=TARGETS)
        self.parameters = list(self.roles.parameters.values())
        with torch.no_grad():
            for parameter in self.parameters:
                # The trained policy has left the old one, and both factors of LoRA have gradients.
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        self.batch = batch
        self.clean = torch.randn(batch, CHANNELS, LATENT, LATENT)
        self.noise = torch.randn_like(self.clean)
        self.sigma = torch.linspace(0.1, 0.9, batch)
        self.text = torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH)
        self.pooled = torch.randn(batch, TEXT_WIDTH)
        self.settings: dict[str, Any] = {
            "parameters": sum(p.numel() for n, p in self.transformer.named_parameters() if "lora_" not in n),
            "trainable": sum(p.numel() for p in self.parameters),
            "rank": RANK,
            "batch": batch,
            "tokens": (LATENT // 2) ** 2 + TEXT_TOKENS,
        }

    def forward(self, *, recorded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Terms L+ and L- per sample, and the weighted KL term."""
        with torch.no_grad():
            old, reference = self._velocity("old"), self._velocity("reference")
        with gb.record(self.transformer) if recorded else contextlib.nullcontext():
            velocity = self._velocity("default")
        plus, minus = nft_terms(self.clean, self.noise, self.sigma, velocity, old, guidance_beta=0.1)
        return plus, minus, KL_WEIGHT * kl_term(velocity, reference).mean()

    def weighted_sum(self, r: Tensor) -> None:
        """One loss, the mean of the rewards', and one backward pass."""
        self.clear()
        plus, minus, kl = self.forward()
        mixed = r.mean(1)
        ((mixed * plus + (1 - mixed) * minus).mean() + kl).backward()

    def balanced(
        self, r: Tensor, balancer: gb.Balancer, collector: Literal["passes", "linear"] | None, *, center: bool = False
    ) -> None:
        """One balanced gradient.

        Args:
            r: [B, K] optimality of each sample for each reward.
            balancer: Where it needs no rows, this is one backward pass of the cached weights.
            collector: The one to use; None where the balancer needs no rows.
            center: Balance only the part of the loss that knows the reward.
        """
        self.clear()
        plus, minus, kl = self.forward(recorded=collector == "linear")
        loss = gb.AffineLoss.interpolate(plus, minus, r, center=center)
        extra = kl if loss.common is None else kl + loss.common
        info = gb.backward(loss, self.parameters, balancer, extra_loss=extra, collector=collector or "auto")
        if info.collector != collector:
            raise RuntimeError(f"meant to measure {collector}, found {info.collector}: {info.collector_reason}")

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _velocity(self, role: Literal["default", "old", "reference"]) -> Tensor:
        with self.roles.role(role), warnings.catch_warnings():
            # diffusers calls a constructor that torch 2.13 deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            output: Tensor = self.transformer(
                hidden_states=interpolate_noise(self.clean, self.noise, self.sigma),
                encoder_hidden_states=self.text,
                pooled_projections=self.pooled,
                timestep=1000 * self.sigma,
                return_dict=False,
            )[0]
        return output
