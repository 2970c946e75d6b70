"""Finds plain shapes on a picture and names their class and color."""

import colorsys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from gradbalance_diffusers.rewards.segmentation import Drawn, Floats, Mask, segment
from gradbalance_diffusers.tiny.palette import COLORS, SHAPES

MIN_FIT = 0.6
"""Least overlap (intersection over union) with an ideal shape at which an object counts as that shape."""
MIN_SATURATION = 0.15
"""Least HSV saturation at which an object has a hue to speak of."""


@dataclass(frozen=True)
class Found:
    """An object on a picture.

    Attributes:
        shape: Class, None if it fits none.
        color: Name of the color, None if it has no hue.
        center: Center of the bounding box (x, y), pixels.
        size: Width and height of the bounding box, pixels.
    """

    shape: str | None
    color: str | None
    center: tuple[float, float]
    size: tuple[float, float]


def find_objects(picture: Floats) -> list[Found]:
    """Lists the objects on a picture (H, W, 3) with values in [0, 1].

    Objects are the connected regions of `segment`. A region belongs to the class whose ideal shape in the same
    bounding box it overlaps best, and to the color of the nearest hue.
    """
    drawn = segment(picture)
    return [_describe(picture, drawn, i, window) for i, window in enumerate(ndimage.find_objects(drawn.labels), 1)]


def _describe(picture: Floats, drawn: Drawn, i: int, window: tuple[slice, slice]) -> Found:
    rows, columns = window
    mask = drawn.labels[window] == i
    # The most contrasting half of the pixels: edges mix the color with the background.
    contrast = drawn.distance[window][mask]
    color = np.median(picture[window][mask][contrast >= np.median(contrast)], axis=0)
    return Found(
        shape=classify_shape(mask),
        color=classify_color(color),
        center=((columns.start + columns.stop) / 2, (rows.start + rows.stop) / 2),
        size=(columns.stop - columns.start, rows.stop - rows.start),
    )


def classify_shape(mask: Mask) -> str | None:
    """Names the shape that fills its bounding box as the mask does, None if no overlap reaches `MIN_FIT`."""
    height, width = mask.shape
    fits = {}
    for shape in SHAPES:
        ideal = _ideal(shape, width, height)
        fits[shape] = (mask & ideal).sum() / (mask | ideal).sum()
    best = max(fits, key=fits.__getitem__)
    square_enough = 0.6 <= width / height <= 1 / 0.6
    return best if fits[best] >= MIN_FIT and square_enough else None


def classify_color(color: Floats) -> str | None:
    """Names the color of the nearest hue, None for a color without one."""
    hue, saturation, _ = colorsys.rgb_to_hsv(*color)
    if saturation < MIN_SATURATION:
        return None
    hues = {name: colorsys.rgb_to_hsv(*(c / 255 for c in rgb))[0] for name, rgb in COLORS.items()}
    return min(hues, key=lambda name: min(abs(hue - hues[name]), 1 - abs(hue - hues[name])))


@lru_cache(maxsize=1024)
def _ideal(shape: str, width: int, height: int) -> Mask:
    """Draws a shape that fills a box, at 8 samples a pixel."""
    n = 8
    image = Image.new("L", (width * n, height * n))
    draw = ImageDraw.Draw(image)
    right, bottom = width * n - 1, height * n - 1
    if shape == "circle":
        draw.ellipse((0, 0, right, bottom), fill=255)
    elif shape == "square":
        draw.rectangle((0, 0, right, bottom), fill=255)
    else:
        draw.polygon([(right / 2, 0), (right, bottom), (0, bottom)], fill=255)
    return np.asarray(image.reduce(n)) >= 128
