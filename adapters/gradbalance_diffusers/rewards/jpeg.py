"""JPEG compressibility: a reward that needs no model and no prompt."""

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from gradbalance_diffusers.rewards.images import to_uint8

QUALITY = 95
"""JPEG quality, as in DDPO (Black et al. 2023)."""


class JPEGCompressibility:
    """Reward for pictures that compress well: minus the kilobytes (1000 bytes) of the JPEG file at quality 95.

    Example:
        >>> import torch
        >>> plain, noise = torch.zeros(3, 64, 64), torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
        >>> scores = JPEGCompressibility()(torch.stack([plain, noise]), ["", ""])
        >>> scores[0] > scores[1]
        True
    """

    name = "jpeg"

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1]; prompts and metadata are not looked at."""
        return [-_kilobytes(Image.fromarray(array)) for array in to_uint8(images)]


def _kilobytes(picture: Image.Image) -> float:
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=QUALITY)
    return len(file.getvalue()) / 1000
