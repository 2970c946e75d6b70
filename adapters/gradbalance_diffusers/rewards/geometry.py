"""GenEval-like reward for pictures of plain shapes, checked by geometry instead of a detector."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gradbalance_diffusers.rewards.geneval_request import Entry, Request, read_request
from gradbalance_diffusers.rewards.geneval_rules import Box, count_credit, relations
from gradbalance_diffusers.rewards.objects import Found, find_objects
from gradbalance_diffusers.rewards.segmentation import Floats, to_arrays
from gradbalance_diffusers.tiny.palette import COLORS, SHAPES


class GenEvalGeometry:
    r"""Reward for the right number, color, shape and position of plain shapes, in [0, 1].

    Follows the partial credit of GenEval (Ghosh et al. 2023) as used by Flow-GRPO, clamped to [0, 1]. Every entry of
    `include` asks for `count` objects of a class. With n found objects of the class and m of them in the color, it
    contributes the checks

    * count: $\max(0, 1 - |count - n| / count)$,
    * color: $\max(0, 1 - |count - m| / count)$, but 0 when the count is wrong,
    * position: 1 when all found objects stand in the relation (:func:`~.geneval_rules.relations`) to all objects of the
      entry referred to, else 0; 0 when the count is wrong.

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
            None
            if include is None
            else self._score(picture, read_request(include, classes=SHAPES, colors=list(COLORS)))
            for picture, include in zip(to_arrays(images), includes, strict=True)
        ]

    def _score(self, picture: Floats, request: Request) -> float:
        found = find_objects(picture)
        credits = check(found, request)
        if not self.strict:
            return float(np.mean(credits))
        return float(min(credits) == 1.0 and len(found) == sum(entry.count for entry in request.include))


def check(found: Sequence[Found], request: Request) -> list[float]:
    """Returns the partial credit of every check, in [0, 1], in the order of `include`."""
    matches = _assign(found, request.include)
    credits: list[float] = []
    for entry, objects in zip(request.include, matches, strict=True):
        right = len(objects) == entry.count
        credits.append(count_credit(entry.count, len(objects)))
        if entry.color is not None:
            colored = sum(o.color == entry.color for o in objects)
            credits.append(count_credit(entry.count, colored) if right else 0.0)
        if entry.relation is not None:
            others = matches[entry.target]
            holds = all(entry.relation in relations(_box(a), _box(b)) for a in objects for b in others)
            credits.append(float(right and bool(others) and holds))
    return credits


def _assign(found: Sequence[Found], include: Sequence[Entry]) -> list[list[Found]]:
    """Gives every object of a requested class to one entry.

    Where several entries ask for its class, an object goes to the one with its color, or else to the one that lacks
    most.
    """
    matches: list[list[Found]] = [[] for _ in include]
    kinds = [(entry.label, entry.color) for entry in include]
    for o in sorted(found, key=lambda o: (o.shape, o.color) not in kinds):
        entries = [i for i, entry in enumerate(include) if entry.label == o.shape]
        if entries:
            same = [i for i in entries if include[i].color == o.color]
            matches[max(same or entries, key=lambda i: include[i].count - len(matches[i]))].append(o)
    return matches


def _box(found: Found) -> Box:
    (x, y), (width, height) = found.center, found.size
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2
