"""What a GenEval row asks for (Ghosh et al. 2023, arXiv 2310.11513), read from its metadata and checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradbalance.errors import InvalidArgumentError

CLASSES: tuple[str, ...] = tuple(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
    parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
    handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
    surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
    broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    computer mouse, tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock,
    vase, scissors, teddy bear, hair drier, toothbrush""".replace("\n    ", " ").split(", ")
)
"""GenEval's names of the 80 classes of COCO, in COCO's order.

COCO calls three of them otherwise: mouse, remote, keyboard.
"""

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""Colors that GenEval asks for and tells apart."""

RELATIONS = ("left of", "right of", "above", "below")
"""Spatial relations between two objects."""


@dataclass(frozen=True)
class Entry:
    """One wish: so many objects of a class.

    Attributes:
        label: Class.
        count: Number of objects, at least 1.
        color: Color of all of them; None: any.
        relation: Where all of them stand, seen from every object of the entry ``target``; None: anywhere.
        target: Index of an earlier entry of `include`.
    """

    label: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = 0


@dataclass(frozen=True)
class Request:
    """What a picture must show.

    Attributes:
        include: Wishes, all of which must be met.
        exclude: Number of objects of a class from which on there are too many; only label and count are used.
        tag: Kind of prompt, such as ``"counting"``.
    """

    include: tuple[Entry, ...]
    exclude: tuple[Entry, ...] = ()
    tag: str | None = None


def read_request(
    include: Sequence[Mapping[str, Any]],
    exclude: Sequence[Mapping[str, Any]] | None = None,
    tag: str | None = None,
    *,
    classes: Sequence[str] = CLASSES,
    colors: Sequence[str] = COLORS,
) -> Request:
    """Read the metadata of one row.

    Args:
        include: Mappings with ``class``, ``count`` and possibly ``color`` and ``position``, the relation and the index
            of an earlier entry.
        exclude: Mappings with ``class`` and ``count``.
        tag: Kind of prompt.
        classes: Classes that can be detected.
        colors: Colors that can be told apart.

    Raises:
        InvalidArgumentError: An empty ``include``, or an entry that breaks a rule.

    >>> read_request([{"class": "cow", "count": 2, "color": "red"}]).include
    (Entry(label='cow', count=2, color='red', relation=None, target=0),)
    """
    if not _is_rows(include) or not include or not _is_rows(exclude or ()):
        raise InvalidArgumentError(
            "`include` must be a list of one or more mappings with class and count, `exclude` a list of such or None. "
            f"Found include={include!r}, exclude={exclude!r}."
        )
    return Request(
        include=tuple(_entry("include", row, i, classes, colors) for i, row in enumerate(include)),
        exclude=tuple(_entry("exclude", row, 0, classes, colors) for row in exclude or ()),
        tag=tag,
    )


def _entry(key: str, row: Mapping[str, Any], index: int, classes: Sequence[str], colors: Sequence[str]) -> Entry:
    label, count, color = row.get("class"), row.get("count"), row.get("color")
    if not isinstance(label, str) or label not in classes:
        raise InvalidArgumentError(
            f"`{key}`: class must be one of {_listing(classes)}. Found {label!r}.{_near(label, classes)}"
        )
    if type(count) is not int or count < 1:
        raise InvalidArgumentError(f"`{key}`: count must be a positive integer. Found {count!r} for {label!r}.")
    if color is not None and color not in colors:
        raise InvalidArgumentError(f"`{key}`: color must be one of {', '.join(colors)}. Found {color!r} for {label!r}.")
    if row.get("position") is None:
        return Entry(label, count, color)
    relation, target = _position(row["position"])
    if relation not in RELATIONS or type(target) is not int or not 0 <= target < index:
        raise InvalidArgumentError(
            f"`{key}`: position must be [relation, index of an earlier entry], the relation one of "
            f"{', '.join(RELATIONS)}. Found {row['position']!r} for {label!r}, entry {index}."
        )
    return Entry(label, count, color, relation, target)


def _position(value: object) -> tuple[object, object]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return value[0], value[1]
    return None, None


def _is_rows(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(row, Mapping) for row in value)  # type: ignore[attr-defined]


def _listing(classes: Sequence[str]) -> str:
    few = 10
    return ", ".join(classes) if len(classes) <= few else f"GenEval's {len(classes)} names of COCO classes"


def _near(label: object, classes: Sequence[str]) -> str:
    close = [name for name in classes if str(label) in name.split()] or difflib.get_close_matches(str(label), classes)
    return f" Did you mean {close[0]!r}?" if close else ""
