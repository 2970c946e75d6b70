"""Names the color of an object on a picture with CLIP, as GenEval does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .clip import CLIP
from .geneval_request import COLORS
from .geneval_rules import Detection
from .images import resized_with_pil

SURROUNDINGS = 0x99
"""Level of the gray, #999, that everything but the object is painted in."""
TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
"""Texts that stand for a color, averaged."""


class ColorNamer:
    r"""Zero-shot classification of an object's color by CLIP.

    A color c of an object of class x is described by t(c, x), the mean over `TEMPLATES` of their unit-norm text
    features, itself scaled to norm 1. With the image features f of the object cut out of the picture, the color is

    $$\operatorname{argmax}_c \langle f, t(c, x) \rangle$$

    The object is cut out by its box; pixels in the box that are not in its mask are painted in `SURROUNDINGS`.

    Args:
        clip: GenEval takes OpenAI's ViT-L/14.
        batch_size: Objects looked at at once.
    """

    def __init__(self, clip: CLIP, *, batch_size: int = 32) -> None:
        self._clip = clip
        self._batch_size = batch_size
        self._texts: dict[str, Tensor] = {}

    def __call__(self, cutouts: Sequence[NDArray[np.uint8]], labels: Sequence[str]) -> list[str]:
        """The colors of objects, from their pictures as :func:`cut_out` makes them and their classes."""
        colors: list[str] = []
        for start in range(0, len(cutouts), self._batch_size):
            batch = slice(start, start + self._batch_size)
            colors += [COLORS[i] for i in self.cosines(cutouts[batch], labels[batch]).argmax(dim=1).tolist()]
        return colors

    def cosines(self, cutouts: Sequence[NDArray[np.uint8]], labels: Sequence[str]) -> Tensor:
        """How well each of B objects agrees with each of `COLORS`, ``[B, 10]``."""
        pixels = torch.cat([self._prepare(cutout) for cutout in cutouts])
        texts = torch.stack([self._text(label) for label in labels])
        with torch.inference_mode():
            return torch.einsum("bd,bcd->bc", self._clip.image_features(pixels), texts)

    def _prepare(self, cutout: NDArray[np.uint8]) -> Tensor:
        picture = torch.from_numpy(cutout).permute(2, 0, 1)[None].float() / 255
        return resized_with_pil(picture, self._clip.image_size)

    def _text(self, label: str) -> Tensor:
        """Features ``[colors, D]`` of the colors of a class."""
        if label not in self._texts:
            texts = [template.format(color=color, label=label) for color in COLORS for template in TEMPLATES]
            with torch.inference_mode():
                features = self._clip.text_features(texts).view(len(COLORS), len(TEMPLATES), -1).mean(dim=1)
                self._texts[label] = torch.nn.functional.normalize(features, dim=-1)
        return self._texts[label]


def cut_out(picture: NDArray[np.uint8], detection: Detection) -> NDArray[np.uint8]:
    """The object on a picture ``[H, W, 3]``: the inside of its box, painted gray outside of its mask.

    >>> picture = np.full((4, 4, 3), 7, dtype=np.uint8)
    >>> mask = np.eye(4, dtype=bool)
    >>> cut_out(picture, Detection("kite", 0.9, (1, 1, 3, 3), mask))[..., 0]
    array([[  7, 153],
           [153,   7]], dtype=uint8)
    """
    left, top, right, bottom = (round(edge) for edge in detection.box)
    inside = picture[top:bottom, left:right]
    if detection.mask is None:
        return inside
    return np.where(detection.mask[top:bottom, left:right, None], inside, np.uint8(SURROUNDINGS))
