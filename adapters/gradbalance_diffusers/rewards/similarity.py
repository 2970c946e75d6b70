"""What PickScore and CLIPScore share: the similarity of a picture and its prompt by a CLIP model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from .batches import check_batch_size, in_batches
from .models import load_clip


class CLIPSimilarity:
    r"""$R = e^{t} \cos(f(x), g(c)) / s$ with image features f, text features g and the logit scale $e^{t}$ of a CLIP.

    Prompts are cut to 77 tokens. A subclass says which model, the divisor s, and how pictures are prepared.

    Args:
        path: Folder or hub id of the model. None: the published one, :attr:`published`.
        tokenizer: Folder or hub id of its tokenizer. None: ``path``.
        revision: Branch, tag or commit on the hub. None: its main branch.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: Such as ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures scored at once.

    Raises:
        InvalidArgumentError: A model or tokenizer that cannot be loaded, or options that do not fit.
    """

    name: ClassVar[str]
    published: ClassVar[str]
    divisor: ClassVar[float]

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        model = self.published if path is None else path
        self._clip = load_clip(model, tokenizer=tokenizer, revision=revision, dtype=dtype, device=device)

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], for their prompts; metadata is not looked at."""
        return in_batches(self._score, images, prompts, self._batch_size)

    def prepare(self, images: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in [0, 1] at the size of the model."""
        raise NotImplementedError

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self._clip.logit_scale * self._clip.cosines(self.prepare(images), prompts) / self.divisor
