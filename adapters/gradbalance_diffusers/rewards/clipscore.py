"""CLIPScore: does a picture show what its prompt says?"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbalance_diffusers.rewards.batches import check_batch_size, in_batches
from gradbalance_diffusers.rewards.images import cropped
from gradbalance_diffusers.rewards.models import load_clip

SCALE = 100
"""Divides the logit: the logit scale of OpenAI's models, so that the score is the cosine."""


class CLIPScore:
    r"""Agreement of a picture with its prompt by CLIP ViT-L/14 (Radford et al. 2021, arXiv 2103.00020).

    $$R = e^{t} \cos(f(x), g(c)) / 100$$

    with image features f, text features g and the logit scale $e^{t}$, which is 100 for OpenAI's models: the score is
    the cosine, without the factor 2.5 and the cut at 0 of Hessel et al. (2021). Pictures are resized in floating point
    by the bilinear filter and centre cropped, as flow_grpo does; prompts are cut to 77 tokens. Typical values are 0.2
    to 0.4.

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

    name = "clipscore"

    def __init__(
        self,
        path: str | Path = "openai/clip-vit-large-patch14",
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
        pixels = cropped(images.to(self._clip.device), self._clip.image_size)
        return self._clip.logit_scale * self._clip.cosines(pixels, prompts) / SCALE
