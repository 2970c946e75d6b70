"""Pictures for people: from tensors, enlarged without blur, in grids, and inlined into a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from gradbalance.errors import InvalidArgumentError


def to_image(tensor: Tensor) -> Image.Image:
    """A picture ``[3, H, W]`` in [0, 1] as 8-bit RGB; values outside are clipped.

    >>> import torch
    >>> to_image(torch.ones(3, 2, 4)).size
    (4, 2)
    """
    if tensor.ndim != 3 or tensor.shape[0] != 3:
        raise InvalidArgumentError(f"`tensor` must have shape [3, H, W]. Found {tuple(tensor.shape)}.")
    values = tensor.detach().float().clamp(0, 1).mul(255).round().byte()
    return Image.fromarray(values.permute(1, 2, 0).cpu().contiguous().numpy())


def enlarge(image: Image.Image, scale: int) -> Image.Image:
    """``image`` with each pixel repeated ``scale`` times in both directions: pixels stay sharp squares."""
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def image_grid(
    images: Sequence[Image.Image], columns: int, scale: int = 1, captions: Sequence[str] | None = None
) -> Image.Image:
    """Pictures side by side on white, row by row.

    Args:
        images: Pictures of one size.
        columns: Pictures per row.
        scale: Enlargement, a whole number.
        captions: A line under each picture, cut to its width.

    Returns:
        One RGB picture.

    Raises:
        InvalidArgumentError: No pictures, different sizes, or another number of captions.

    >>> image_grid([Image.new("RGB", (32, 32))] * 5, columns=3, scale=2).size
    (216, 144)
    """
    if not images or len({image.size for image in images}) != 1:
        sizes = sorted({image.size for image in images})
        raise InvalidArgumentError(f"`images` must be one or more pictures of one size. Found sizes {sizes}.")
    if captions is not None and len(captions) != len(images):
        raise InvalidArgumentError(f"`captions` must be one per picture, {len(images)}. Found {len(captions)}.")
    if columns < 1 or scale < 1:
        raise InvalidArgumentError(f"`columns` and `scale` must be at least 1. Found {columns} and {scale}.")
    gap, line = 8, 16 if captions else 0
    width, height = images[0].width * scale, images[0].height * scale
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * (width + gap), rows * (height + line + gap)), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(11)
    for index, image in enumerate(images):
        left = gap // 2 + index % columns * (width + gap)
        top = gap // 2 + index // columns * (height + line + gap)
        grid.paste(enlarge(image.convert("RGB"), scale), (left, top))
        if captions is not None:
            draw.text((left, top + height + 1), _fit(captions[index], width, font), "#333333", font)
    return grid


def data_uri(image: Image.Image | Path) -> str:
    """A picture, or a PNG file as it is, as a ``data:`` address that a page can hold by itself."""
    if isinstance(image, Path):
        content = image.read_bytes()
    else:
        stream = io.BytesIO()
        image.save(stream, "PNG", optimize=True)
        content = stream.getvalue()
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _fit(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
