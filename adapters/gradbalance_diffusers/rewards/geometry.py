"""GenEval-like reward for pictures of plain shapes, checked by geometry instead of a detector."""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.segmentation import Drawn, Floats, Mask, segment, to_arrays
from gradbalance_diffusers.tiny.palette import COLORS, RELATIONS, SHAPES

MIN_FIT = 0.6
"""Least overlap (intersection over union) with an ideal shape at which an object counts as that shape."""
MARGIN = 0.1
"""An offset must exceed this share of the summed sizes of two objects to count as a spatial relation, as in GenEval."""
MIN_SATURATION = 0.15
"""Least HSV saturation at which an object has a hue to speak of."""


@dataclass(frozen=True)
class Found:
    """An object on a picture: class, color (None if it has none of the known ones), center (x, y) and size (w, h), pixels."""

    shape: str | None
    color: str | None
    center: tuple[float, float]
    size: tuple[float, float]


class GenEvalGeometry:
    r"""Reward for the right number, color, shape and position of plain shapes, in [0, 1].

    Follows the partial credit of GenEval (Ghosh et al. 2023) as used by Flow-GRPO, clamped to [0, 1]. Every entry of `include`
    asks for `count` objects of a class. With n found objects of the class and m of them in the color, it contributes the checks

    * count: $\max(0, 1 - |count - n| / count)$,
    * color: $\max(0, 1 - |count - m| / count)$, but 0 when the count is wrong,
    * position: 1 when all found objects stand in the relation to all objects of the entry referred to, else 0; 0 when the count
      is wrong.

    The score is the mean of all checks. In `strict` mode it is 1 when all checks are fully met and no object of another kind
    is on the picture, else 0.

    Objects are connected regions; see `segment`. A region belongs to the class whose ideal shape in the same bounding box it
    overlaps best, and to the color of the nearest hue.

    Args:
        strict: Whether to score all or nothing.

    Example:
        >>> from PIL import Image, ImageDraw
        >>> import torch
        >>> picture = Image.new("RGB", (32, 32), "white")
        >>> ImageDraw.Draw(picture).rectangle((4, 4, 13, 13), fill=(222, 36, 40))
        >>> images = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255
        >>> red_square = [{"class": "square", "count": 1, "color": "red"}]
        >>> GenEvalGeometry()(images, ["one red square"], include=[red_square])
        [1.0]
        >>> two_blue = [{"class": "square", "count": 2, "color": "blue"}]
        >>> GenEvalGeometry()(images, ["two blue squares"], include=[two_blue])
        [0.25]
    """

    name = "geneval"

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], by the entries of `include`; None where a row has none."""
        includes = metadata.get("include") or [None] * len(prompts)
        return [
            None if include is None else self._score(picture, include)
            for picture, include in zip(to_arrays(images), includes, strict=True)
        ]

    def _score(self, picture: Floats, include: Sequence[Mapping[str, Any]]) -> float:
        found = find_objects(picture)
        checks = check(found, include)
        if not self.strict:
            return float(np.mean(checks))
        return float(min(checks) == 1.0 and len(found) == sum(entry["count"] for entry in include))


def check(found: Sequence[Found], include: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the partial credit of every check, in [0, 1], in the order of `include`."""
    _validate(include)
    # An object counts for the entry whose color it has if several entries ask for the same class.
    matches = [_matching(found, entry, include) for entry in include]
    credits: list[float] = []
    for entry, objects in zip(include, matches, strict=True):
        count = entry["count"]
        right = len(objects) == count
        credits.append(max(0.0, 1 - abs(count - len(objects)) / count))
        if "color" in entry:
            colored = sum(o.color == entry["color"] for o in objects)
            credits.append(max(0.0, 1 - abs(count - colored) / count) if right else 0.0)
        if "position" in entry:
            relation, target = entry["position"]
            others = matches[target]
            holds = all(_stands(a, b, relation) for a in objects for b in others)
            credits.append(float(right and bool(others) and holds))
    return credits


def _matching(found: Sequence[Found], entry: Mapping[str, Any], include: Sequence[Mapping[str, Any]]) -> list[Found]:
    rivals = {e.get("color") for e in include if e is not entry and e["class"] == entry["class"]}
    return [o for o in found if o.shape == entry["class"] and (o.color == entry.get("color") or o.color not in rivals)]


def _stands(a: Found, b: Found, relation: str) -> bool:
    axis = 0 if relation in ("left of", "right of") else 1
    sign = -1 if relation in ("left of", "above") else 1
    offset = [a.center[i] - b.center[i] for i in (0, 1)]
    reach = [max(0.0, abs(offset[i]) - MARGIN * (a.size[i] + b.size[i])) for i in (0, 1)]
    length = float(np.hypot(*reach))
    return length > 0 and sign * offset[axis] > 0 and reach[axis] / length > 0.5


def find_objects(picture: Floats) -> list[Found]:
    """Lists the objects on a picture (H, W, 3) with values in [0, 1]."""
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


def _validate(include: Sequence[Mapping[str, Any]]) -> None:
    for entry in include:
        count, shape = entry.get("count"), entry.get("class")
        if shape not in SHAPES:
            raise InvalidArgumentError(f"include: class must be one of {', '.join(SHAPES)}, found {shape!r}.")
        if not isinstance(count, int) or count < 1:
            raise InvalidArgumentError(f"include: count must be a positive integer, found {count!r}.")
        relation, target = entry.get("position", (RELATIONS[0], 0))
        if relation not in RELATIONS or not 0 <= target < len(include):
            raise InvalidArgumentError(
                f"include: position must be [one of {', '.join(RELATIONS)}; index of an entry], found {entry['position']!r}."
            )
