"""Separates what is drawn from a plain background: shared by the geometric and the appearance rewards."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MIN_CONTRAST = 0.15
"""Least RGB distance to the background, of at most sqrt(3), at which a pixel can belong to something drawn."""
MIN_AREA = 8 / 32**2
"""Least area of an object as a share of the picture."""


def to_arrays(images: Tensor) -> Floats:
    """Converts pictures (B, 3, H, W) in [0, 1] to float64 arrays (B, H, W, 3)."""
    return images.detach().float().clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy().astype(np.float64)


def background_color(picture: Floats) -> Floats:
    """Returns the median color of the outermost ring of pixels, (3,)."""
    ring = np.concatenate([picture[0], picture[-1], picture[1:-1, 0], picture[1:-1, -1]])
    return np.median(ring, axis=0)


@dataclass(frozen=True)
class Drawn:
    """What is drawn on a picture.

    Attributes:
        background: Color of the background, (3,).
        distance: RGB distance of every pixel to the background, (H, W).
        mask: Pixels that belong to objects: at least half as far from the background as the strongest part of their
            object.
        labels: Number of the object of every pixel of the mask, from 1; 0 elsewhere.
        count: Number of objects.
    """

    background: Floats
    distance: Floats
    mask: Mask
    labels: NDArray[np.int32]
    count: int


def segment(picture: Floats) -> Drawn:
    """Finds the objects on a picture (H, W, 3) with values in [0, 1].

    Connected regions beyond `MIN_CONTRAST` are cut at half of their own peak contrast (90th percentile), which puts
    the outline of a blurred edge where the sharp edge was. Regions smaller than `MIN_AREA` are dropped.
    """
    background = background_color(picture)
    distance = np.linalg.norm(picture - background, axis=-1)
    regions, n = ndimage.label(distance > MIN_CONTRAST)
    mask = np.zeros(distance.shape, dtype=bool)
    for i, window in enumerate(ndimage.find_objects(regions, n), 1):
        inside = regions[window] == i
        peak = np.percentile(distance[window][inside], 90)
        mask[window] |= inside & (distance[window] >= peak / 2)
    labels, n = ndimage.label(mask)
    areas = np.bincount(labels.ravel(), minlength=n + 1)
    kept = np.flatnonzero(areas[1:] >= MIN_AREA * mask.size) + 1
    renumber = np.zeros(n + 1, dtype=np.int32)
    renumber[kept] = np.arange(1, len(kept) + 1)
    labels = renumber[labels]
    return Drawn(background, distance, labels > 0, labels, len(kept))
