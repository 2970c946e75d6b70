"""Training pictures and captions of the tiny task, right ones and slightly wrong ones."""

import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gradbalance_diffusers.tiny.palette import BACKGROUNDS, COLORS, COUNTS, SHAPES
from gradbalance_diffusers.tiny.prompts import SOURCES, Row, counting_row, ocr_row, pair_row, tiny_prompts
from gradbalance_diffusers.tiny.scene import draw_scene

T = TypeVar("T")

MIX = {"ocr": 0.3, "geneval": 0.6, "general": 0.1}
"""Share of the sources among the training pictures."""
TAG_MIX = {"single_object": 0.1, "counting": 0.25, "two_object": 0.3, "position": 0.35}
"""Share of the tags among the geneval pictures: pairs of objects bind last and get more than in the prompt lists."""

WRONG_SHARES = {"ocr": 0.5, "geneval": 0.15, "general": 0.15}
"""Share of the captions that are wrong in the last stage of pre-training."""


def draw_pool(size: int, seed: int) -> tuple[list[Row], Tensor]:
    """Draws training pictures of the train split.

    Args:
        size: Number of pictures.
        seed: Seed of prompts and layouts.

    Returns:
        The row of every picture and the pictures, uint8 (size, 3, 32, 32).
    """
    rng = random.Random(seed)
    prompts = {source: _by_tag(tiny_prompts("train", source, seed=seed)) for source in SOURCES}
    rows: list[Row] = []
    for source in rng.choices(SOURCES, weights=[MIX[source] for source in SOURCES], k=size):
        groups, shares = prompts[source]
        rows.append(rng.choice(rng.choices(groups, weights=shares)[0]))
    pictures = np.stack([np.asarray(draw_scene(row, rng)) for row in rows])
    return rows, torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def to_unit(pictures: Tensor) -> Tensor:
    """Maps uint8 pictures to the float range [-1, 1] of the autoencoder."""
    return pictures.float() / 127.5 - 1.0


def wrong_caption(row: Row, rng: random.Random) -> str:
    """Returns a prompt that is wrong in one fact: the digits, a count, color, shape, order or background."""
    background = row["background"]
    if row["source"] == "general":
        other = _other(tuple(BACKGROUNDS), background, rng)
        return row["prompt"].replace(f"a {background} background", f"a {other} background")
    if row["source"] == "ocr":
        color, text = row["prompt"].split()[1], row["prompt"].split('"')[1]
        return ocr_row(color, "".join(_other("0123456789", digit, rng) for digit in text), background)["prompt"]
    include = row["include"]
    if len(include) == 1:
        return _wrong_count(include[0], background, rng)
    return _wrong_pair(row, rng)


def _wrong_count(entry: Row, background: str, rng: random.Random) -> str:
    count, color, shape = entry["count"], entry["color"], entry["class"]
    fact = rng.choice(("count", "color", "shape"))
    if fact == "count":
        count = _other(tuple(COUNTS), count, rng)
    elif fact == "color":
        color = _other(tuple(COLORS), color, rng)
    else:
        shape = _other(SHAPES, shape, rng)
    return counting_row(count, color, shape, background)["prompt"]


def _wrong_pair(row: Row, rng: random.Random) -> str:
    include = row["include"]
    relation = include[1].get("position", (None,))[0]
    objects = [(entry["color"], entry["class"]) for entry in include]
    if relation:
        objects.reverse()  # `include` starts with the object that is referred to, the prompt with the other one
    if relation and rng.random() < 1 / 3:
        objects.reverse()
    else:
        i = rng.randrange(2)
        color, shape = objects[i]
        objects[i] = (
            (_other(tuple(COLORS), color, rng), shape) if rng.random() < 0.5 else (color, _other(SHAPES, shape, rng))
        )
    return pair_row(objects[0], objects[1], row["background"], relation)["prompt"]


def _by_tag(rows: Sequence[Row]) -> tuple[list[list[Row]], list[float]]:
    """Groups rows by tag and returns the groups with their shares."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("tag", ""), []).append(row)
    return list(groups.values()), [TAG_MIX.get(tag, 1.0) for tag in groups]


def _other(values: Sequence[T], value: T, rng: random.Random) -> T:
    return rng.choice([v for v in values if v != value])
