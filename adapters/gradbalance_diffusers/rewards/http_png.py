"""Pictures on the wire: 8-bit PNG in base64, read with limits."""

from __future__ import annotations

import base64
import binascii
import io
import warnings

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


def encode_png(image: Tensor, size: tuple[int, int] | None = None) -> str:
    """A picture, float ``[3, H, W]`` in [0, 1], rounded to 8 bits, as PNG in base64.

    Args:
        image: The picture.
        size: Height and width to scale it to (bicubic), if it has others.

    >>> decode_pngs([encode_png(torch.full((3, 2, 2), 0.2))], max_pixels=4).unique()
    tensor([0.2000])
    """
    array = (image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array)
    if size is not None and size != array.shape[:2]:
        picture = picture.resize(size[::-1], Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, format="PNG", compress_level=1)  # level 6, the default, takes several times as long
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_pngs(texts: list[str], max_pixels: int) -> Tensor:
    """The pictures of :func:`encode_png` as one batch, float32 ``[B, 3, H, W]`` in [0, 1].

    No other format is tried, and sizes are looked at before anything is unpacked: a small file can hold a huge picture.

    Raises:
        InvalidArgumentError: No picture, one that cannot be read, different sizes, or more than ``max_pixels`` in all.
    """
    pictures = [_open(text, i) for i, text in enumerate(texts)]
    sizes = {picture.size for picture in pictures}
    if len(sizes) != 1:
        raise InvalidArgumentError(
            f"`images` must hold pictures of one size. Found widths and heights {sorted(sizes)}."
        )
    pixels = sum(picture.width * picture.height for picture in pictures)
    if pixels > max_pixels:
        raise InvalidArgumentError(
            f"`images` must have at most {max_pixels} pixels in all. Found {pixels}: send fewer in one request."
        )
    return torch.stack([_load(picture, i) for i, picture in enumerate(pictures)])


def _open(text: str, number: int) -> Image.Image:
    """The picture with its header read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # sizes are checked against our own limit
            return Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=("PNG",))
    except (binascii.Error, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(number, error) from error


def _load(picture: Image.Image, number: int) -> Tensor:
    try:
        array = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow's PNG reader raises all of these
        raise _unreadable(number, error) from error
    return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255


def _unreadable(number: int, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(f"`images` must be PNG files in base64. Number {number} cannot be read: {error}")
