"""A reward that applies to some prompts only."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class QuotedBrightness:
    """Brightness of the upper half, for prompts with a quoted text."""

    name = "quoted"

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float | None]:
        upper = images[:, :, : images.shape[2] // 2]
        return [float(picture.mean()) if '"' in text else None for picture, text in zip(upper, prompts, strict=True)]
