"""Stage 1 of pre-training: the autoencoder."""

import math

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from tqdm import tqdm

from gradbalance_diffusers.tiny.data import to_unit

BATCH = 32
PEAK_RATE = 3e-3
KL_WEIGHT = 1e-5
"""Small: latents only have to stay near unit scale, they need not be Gaussian."""


def train_vae(vae: AutoencoderKL, pictures: Tensor, steps: int, seed: int = 0) -> float:
    """Trains the autoencoder and sets its scaling and shift factors.

    Minimizes mean |x - x_hat| + 2 mean (x - x_hat)^2 + `KL_WEIGHT` KL with AdamW and a one-cycle rate. Afterwards
    latents (z - shift) * scaling have zero mean and unit variance over the first pictures.

    Args:
        vae: Model to train, in place.
        pictures: uint8 (n, 3, 32, 32).
        steps: Optimizer steps of `BATCH` pictures.
        seed: Seed of the batches and of the latent noise.

    Returns:
        The mean peak signal-to-noise ratio of reconstructions, decibel, on 512 of the pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_RATE, weight_decay=1e-4)
    vae.train()
    progress = tqdm(range(steps), desc="autoencoder", mininterval=5)
    for step in progress:
        optimizer.param_groups[0]["lr"] = PEAK_RATE * warmup_cosine(step, steps, warmup=50)
        batch = to_unit(pictures[torch.randint(len(pictures), (BATCH,), generator=generator)])
        posterior = vae.encode(batch).latent_dist
        output = vae.decode(posterior.sample(generator)).sample
        error = output - batch
        loss = error.abs().mean() + 2 * error.square().mean() + KL_WEIGHT * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    vae.eval()
    sample = pictures[:2048]
    latents = encode(vae, sample, normalize=False)
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return _psnr(vae, sample[:512])


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: Tensor, normalize: bool = True) -> Tensor:
    """Encodes uint8 pictures to the means of their latents, float32 (n, 4, 16, 16), in batches of 256."""
    latents = torch.cat([vae.encode(to_unit(chunk)).latent_dist.mode() for chunk in pictures.split(256)])
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor if normalize else latents


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Decodes normalized latents to pictures in [0, 1], float32 (n, 3, 32, 32), in batches of 256."""
    raw = latents / vae.config.scaling_factor + vae.config.shift_factor
    return torch.cat([(vae.decode(chunk).sample / 2 + 0.5).clamp(0, 1) for chunk in raw.split(256)])


def warmup_cosine(step: int, steps: int, warmup: int, end: float = 0.02) -> float:
    """Returns the rate factor at a step: linear warm-up, then a cosine down to `end`."""
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * share))


def _psnr(vae: AutoencoderKL, pictures: Tensor) -> float:
    squared = (decode(vae, encode(vae, pictures)) - pictures.float() / 255).square().mean((1, 2, 3))
    return float((-10 * squared.log10()).mean())
