"""Prompts of the tiny task: three sources, split into train and test by a hash of the text."""

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.tiny.palette import BACKGROUNDS, COLORS, COUNTS, RELATIONS, SHAPES

Source = Literal["ocr", "geneval", "general"]
Row = dict[str, Any]

SOURCES: tuple[Source, ...] = ("ocr", "geneval", "general")
TEST_SHARE = 5
"""One prompt in this many belongs to the test split."""
TAG_SHARES = {"single_object": 0.15, "counting": 0.35, "two_object": 0.2, "position": 0.3}
"""Share of every tag in a prefix of a geneval list."""


def tiny_prompts(split: Literal["train", "test"], source: Source, size: int | None = None, seed: int = 0) -> list[Row]:
    """Lists prompts of one source and one split, in an order fixed by the seed.

    Train and test never share a prompt text: a text belongs to the test split when its SHA-256 digest, read as an
    integer, is divisible by `TEST_SHARE`. Every prefix of a geneval list mixes the tags in about the same proportion.

    Args:
        split: `train` or `test`.
        source: `ocr` (a quoted number of two or three digits), `geneval` (objects with a check) or `general` (no
            check).
        size: Number of rows; None lists every prompt there is.
        seed: Seed of the order.

    Returns:
        Rows with the keys `prompt`, `source` and `background`. A geneval row also has `tag` and `include`, in the
        form of GenEval (Ghosh et al. 2023): one entry per class with `class`, `count`, `color` and possibly
        `position`, the relation and the index of the entry it refers to.

    Raises:
        InvalidArgumentError: An unknown split or source, or a size that is not between 1 and the number of prompts.

    Example:
        >>> row = tiny_prompts("test", "ocr", size=1)[0]
        >>> row["prompt"]
        'a purple sign that says "225" on a white background'
        >>> row["background"]
        'white'
    """
    if split not in ("train", "test"):
        raise InvalidArgumentError(f"split must be 'train' or 'test', got {split!r}.")
    if source not in SOURCES:
        raise InvalidArgumentError(f"source must be one of {', '.join(SOURCES)}, got {source!r}.")
    rows = [row for row in all_prompts(source) if is_test(row["prompt"]) == (split == "test")]
    if size is not None and not 1 <= size <= len(rows):
        raise InvalidArgumentError(f"size must lie between 1 and {len(rows)} for {source}/{split}, got {size}.")
    random.Random(seed).shuffle(rows)
    return _interleave_tags(rows)[:size]


def is_test(prompt: str) -> bool:
    """Tells whether a prompt text belongs to the test split."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest(), "big") % TEST_SHARE == 0


def all_prompts(source: Source) -> Iterator[Row]:
    """Yields every row of a source, both splits, in a fixed order."""
    return {"ocr": _ocr, "geneval": _geneval, "general": _general}[source]()


def ocr_row(color: str, text: str, background: str) -> Row:
    """Builds a row that asks for a sign with a text."""
    article = "an" if color[0] in "aeiou" else "a"
    prompt = f'{article} {color} sign that says "{text}" on a {background} background'
    return {"prompt": prompt, "source": "ocr", "background": background}


def counting_row(count: int, color: str, shape: str, background: str) -> Row:
    """Builds a row that asks for `count` equal objects."""
    return {
        "prompt": f"{_noun(count, color, shape)} on a {background} background",
        "source": "geneval",
        "background": background,
        "tag": "single_object" if count == 1 else "counting",
        "include": [_entry(count, color, shape)],
    }


def pair_row(first: tuple[str, str], second: tuple[str, str], background: str, relation: str | None = None) -> Row:
    """Builds a row that asks for two objects, each (color, shape), and maybe a relation of the first to the second.

    As in GenEval the object that the relation refers to comes first in `include`.
    """
    joint = relation or "and"
    a, b = _entry(1, *first), _entry(1, *second)
    return {
        "prompt": f"{_noun(1, *first)} {joint} {_noun(1, *second)} on a {background} background",
        "source": "geneval",
        "background": background,
        "tag": "position" if relation else "two_object",
        "include": [b, a | {"position": [relation, 0]}] if relation else [a, b],
    }


def _ocr() -> Iterator[Row]:
    texts = [f"{n:02d}" for n in range(100)] + [f"{n:03d}" for n in range(1000)]
    for text, color, background in itertools.product(texts, COLORS, BACKGROUNDS):
        yield ocr_row(color, text, background)


def _geneval() -> Iterator[Row]:
    kinds = list(itertools.product(COLORS, SHAPES))
    for background in BACKGROUNDS:
        for count, (color, shape) in itertools.product(COUNTS, kinds):
            yield counting_row(count, color, shape, background)
        for first, second in itertools.permutations(kinds, 2):
            for relation in (None, *RELATIONS):
                yield pair_row(first, second, background, relation)


def _general() -> Iterator[Row]:
    things = ["a picture", "some shapes", *(f"some {shape}s" for shape in SHAPES)]
    for thing, tone, background in itertools.product(things, ("warm", "cool", "mixed"), BACKGROUNDS):
        prompt = f"{thing} in {tone} colors on a {background} background"
        yield {"prompt": prompt, "source": "general", "background": background}


def _noun(count: int, color: str, shape: str) -> str:
    return f"{COUNTS[count]} {color} {shape}{'s' if count > 1 else ''}"


def _entry(count: int, color: str, shape: str) -> dict[str, Any]:
    return {"class": shape, "count": count, "color": color}


def _interleave_tags(rows: list[Row]) -> list[Row]:
    """Orders rows by their rank within the tag over the share of the tag: a stable weighted round-robin."""
    seen: dict[str, int] = {}
    keys = []
    for row in rows:
        tag = row.get("tag", "")
        seen[tag] = seen.get(tag, 0) + 1
        keys.append(seen[tag] / TAG_SHARES.get(tag, 1.0))
    return [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0])]
