"""GenEval-like reward for pictures of plain shapes, checked by geometry instead of a detector."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.objects import Found, find_objects
from gradbalance_diffusers.rewards.segmentation import Floats, to_arrays
from gradbalance_diffusers.tiny.palette import RELATIONS, SHAPES

MARGIN = 0.1
"""An offset must exceed this share of the summed sizes of two objects to count as a spatial relation, as in GenEval."""


class GenEvalGeometry:
    r"""Reward for the right number, color, shape and position of plain shapes, in [0, 1].

    Follows the partial credit of GenEval (Ghosh et al. 2023) as used by Flow-GRPO, clamped to [0, 1]. Every entry of
    `include` asks for `count` objects of a class. With n found objects of the class and m of them in the color, it
    contributes the checks

    * count: $\max(0, 1 - |count - n| / count)$,
    * color: $\max(0, 1 - |count - m| / count)$, but 0 when the count is wrong,
    * position: 1 when all found objects stand in the relation to all objects of the entry referred to, else 0; 0 when
      the count is wrong.

    The score is the mean of all checks. In `strict` mode it is 1 when all checks are fully met and no object of
    another kind is on the picture, else 0.

    Objects are connected regions; see `find_objects`. Where several entries ask for the same class, an object counts
    for the entry with its color, or else for the one that lacks most.

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

    name = "geneval_geometry"

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
    matches = _assign(found, include)
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


def _assign(found: Sequence[Found], include: Sequence[Mapping[str, Any]]) -> list[list[Found]]:
    """Gives every object of a requested class to one entry.

    Where several entries ask for its class, an object goes to the one with its color, or else to the one that lacks
    most.
    """
    matches: list[list[Found]] = [[] for _ in include]
    colors = [(entry["class"], entry.get("color")) for entry in include]
    for o in sorted(found, key=lambda o: (o.shape, o.color) not in colors):
        entries = [i for i, entry in enumerate(include) if entry["class"] == o.shape]
        if entries:
            same = [i for i in entries if include[i].get("color") == o.color]
            matches[max(same or entries, key=lambda i: include[i]["count"] - len(matches[i]))].append(o)
    return matches


def _stands(a: Found, b: Found, relation: str) -> bool:
    axis = 0 if relation in ("left of", "right of") else 1
    sign = -1 if relation in ("left of", "above") else 1
    offset = [a.center[i] - b.center[i] for i in (0, 1)]
    reach = [max(0.0, abs(offset[i]) - MARGIN * (a.size[i] + b.size[i])) for i in (0, 1)]
    length = float(np.hypot(*reach))
    return length > 0 and sign * offset[axis] > 0 and reach[axis] / length > 0.5


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
                f"include: position must be [relation, index of an entry] with a relation of {', '.join(RELATIONS)}, "
                f"found {entry['position']!r}."
            )
