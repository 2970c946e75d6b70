"""General rewards for pictures of plain things on a plain background: saturation, contrast, requested background."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.segmentation import Drawn, Floats, segment, to_arrays
from gradbalance_diffusers.tiny.palette import BACKGROUNDS

FULL_CONTRAST = 1.0
"""RGB distance to the background, of at most sqrt(3), that counts as full contrast."""
BACKGROUND_RANGE = 0.5
"""Mean absolute error per channel at which the background reward reaches 0."""


class Saturation:
    r"""Reward for vivid objects: the mean HSV saturation of the drawn pixels, in [0, 1].

    $$R = \frac{1}{|D|} \sum_{p \in D} \frac{\max_c p_c - \min_c p_c}{\max_c p_c}$$

    over the set D of drawn pixels (see `segment`) and the channels c; a black pixel contributes 0. Only drawn pixels
    count, so that more coloured area is not paid for. A picture on which nothing is drawn gets 0.

    Example:
        >>> import torch
        >>> image = torch.ones(1, 3, 32, 32)
        >>> image[:, 1:, 8:24, 8:24] = 0.25
        >>> Saturation()(image, ["a red square"])
        [0.75]
    """

    name = "saturation"

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1]; prompts and metadata are not looked at."""
        return [_saturation(picture, segment(picture)) for picture in to_arrays(images)]


class Contrast:
    r"""Reward for objects that stand out: the mean distance of the drawn pixels to the background, in [0, 1].

    $$R = \frac{1}{|D|} \sum_{p \in D} \min(1, \|p - b\|_2 / c)$$

    with D and the background color b as in `segment` and c = `FULL_CONTRAST`. A picture on which nothing is drawn
    gets 0.

    Example:
        >>> import torch
        >>> image = torch.ones(1, 3, 32, 32)
        >>> image[:, 0, 8:24, 8:24] = 0.5
        >>> Contrast()(image, ["a cyan square"])
        [0.5]
    """

    name = "contrast"

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1]; prompts and metadata are not looked at."""
        return [_contrast(segment(picture)) for picture in to_arrays(images)]


class Background:
    r"""Reward for the requested background, in [0, 1].

    $$R = \max(0, 1 - \frac{1}{c |U|} \sum_{p \in U} \tfrac13 \|p - b\|_1)$$

    over the pixels U that belong to no drawn object (see `segment`), with the requested color b from `BACKGROUNDS` and
    c = `BACKGROUND_RANGE`. A row without the metadata `background` gets None.

    Example:
        >>> import torch
        >>> (score,) = Background()(torch.full((1, 3, 32, 32), 250 / 255 - 0.125), [""], background=["white"])
        >>> round(score, 3)
        0.75
        >>> Background()(torch.zeros(1, 3, 32, 32), ["on a white background"], background=["white"])
        [0.0]

    Raises:
        InvalidArgumentError: An unknown background.
    """

    name = "background"

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], by the metadata `background`."""
        names = metadata.get("background") or [None] * len(prompts)
        return [
            None if name is None else _background(picture, name)
            for picture, name in zip(to_arrays(images), names, strict=True)
        ]


def _saturation(picture: Floats, drawn: Drawn) -> float:
    pixels = picture[drawn.mask]
    if not len(pixels):
        return 0.0
    high, low = pixels.max(axis=1), pixels.min(axis=1)
    return float(np.mean((high - low) / np.maximum(high, 1e-12)))


def _contrast(drawn: Drawn) -> float:
    distances = drawn.distance[drawn.mask]
    return float(np.minimum(distances / FULL_CONTRAST, 1).mean()) if len(distances) else 0.0


def _background(picture: Floats, name: str) -> float:
    if name not in BACKGROUNDS:
        raise InvalidArgumentError(f"background must be one of {', '.join(BACKGROUNDS)}, found {name!r}.")
    pixels = picture[~segment(picture).mask]
    error = np.abs(pixels - np.array(BACKGROUNDS[name]) / 255).mean() if len(pixels) else 1.0
    return float(max(0.0, 1 - error / BACKGROUND_RANGE))
