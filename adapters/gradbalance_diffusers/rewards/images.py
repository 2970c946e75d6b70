"""Brings pictures to the form CLIP models take: the three preparations that published rewards use.

All take pictures ``[B, 3, H, W]``, float in [0, 1], and give float32 ``[B, 3, size, size]`` with CLIP's mean and
standard deviation per channel taken out. They differ by design: a score is comparable with published ones only if the
pixels are the same. Sizes are rounded as the original code does.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def resized_with_pil(images: Tensor, size: int) -> Tensor:
    """CLIP's own preparation: 8-bit pictures, shortest side to ``size`` by PIL's bicubic filter, centre cropped.

    This is what transformers' CLIP image processor does, without torchvision. The result is on the CPU.

    >>> resized_with_pil(torch.ones(1, 3, 20, 30), 8).shape
    torch.Size([1, 3, 8, 8])
    """
    pictures = [Image.fromarray(array) for array in to_uint8(images)]
    return normalized(torch.stack([_crop_pil(picture, size) for picture in pictures]))


def cropped(images: Tensor, size: int) -> Tensor:
    """Shortest side to ``size`` by the antialiased bilinear filter in floating point, centre cropped.

    >>> cropped(torch.ones(1, 3, 20, 30), 8).shape
    torch.Size([1, 3, 8, 8])
    """
    height, width = _scaled(images.shape[-2:], size)
    resized = interpolate(images.float(), (height, width), mode="bilinear", antialias=True)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return normalized(resized[..., top : top + size, left : left + size])


def padded(images: Tensor, size: int) -> Tensor:
    """Longest side to ``size`` by the antialiased bicubic filter in floating point, padded with black to a square.

    >>> padded(torch.ones(1, 3, 20, 40), 8).shape
    torch.Size([1, 3, 8, 8])
    """
    scale = size / max(images.shape[-2:])
    height, width = (max(1, round(side * scale)) for side in images.shape[-2:])
    resized = interpolate(images.float(), (height, width), mode="bicubic", antialias=True)
    left, top = (size - width) // 2, (size - height) // 2
    return normalized(pad(resized, (left, size - width - left, top, size - height - top)))


def normalized(images: Tensor) -> Tensor:
    """Pictures ``[B, 3, H, W]`` in [0, 1] with CLIP's mean and standard deviation per channel taken out."""
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std


def to_uint8(images: Tensor) -> np.ndarray:
    """Pictures as 8-bit arrays ``[B, H, W, 3]`` on the CPU, rounded to the nearest of 256 levels."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def _crop_pil(picture: Image.Image, size: int) -> Tensor:
    height, width = _scaled((picture.height, picture.width), size)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    top, left = (height - size) // 2, (width - size) // 2
    crop = np.asarray(resized.crop((left, top, left + size, top + size)))
    return torch.from_numpy(crop.copy()).permute(2, 0, 1).float() / 255


def _scaled(shape: tuple[int, ...], shortest: int) -> tuple[int, int]:
    """Height and width with the shorter one ``shortest`` and the longer one in proportion, rounded down."""
    height, width = shape
    if height <= width:
        return shortest, int(shortest * width / height)
    return int(shortest * height / width), shortest
