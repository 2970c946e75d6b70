"""PickScore: how much people would like a picture for its prompt."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbalance_diffusers.rewards.batches import check_batch_size, in_batches
from gradbalance_diffusers.rewards.images import resized_with_pil
from gradbalance_diffusers.rewards.models import load_clip

SCALE = 26
"""Divides the score, as DiffusionNFT and flow_grpo do, which brings it near 1."""


class PickScore:
    r"""Human preference for a picture given its prompt (Kirstain et al. 2023, arXiv 2305.01569).

    $$R = e^{t} \cos(f(x), g(c)) / 26$$

    with the image features f and text features g of a CLIP ViT-H/14 fine-tuned on choices of users, and its logit scale
    $e^{t}$. Pictures are prepared by CLIP's own steps on 8-bit pixels, prompts are cut to 77 tokens. Typical values are
    0.75 to 0.95.

    Args:
        path: Folder or hub id of the model.
        tokenizer: Folder or hub id of its tokenizer. None: ``path``.
        revision: Branch, tag or commit on the hub. None: its main branch.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: Such as ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures scored at once.

    Raises:
        InvalidArgumentError: A model or tokenizer that cannot be loaded, or options that do not fit.
    """

    name = "pickscore"

    def __init__(
        self,
        path: str | Path = "yuvalkirstain/PickScore_v1",
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        self._clip = load_clip(path, tokenizer=tokenizer, revision=revision, dtype=dtype, device=device)

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], for their prompts; metadata is not looked at."""
        return in_batches(self._score, images, prompts, self._batch_size)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        pixels = resized_with_pil(images, self._clip.image_size)
        return self._clip.logit_scale * self._clip.cosines(pixels, prompts) / SCALE
