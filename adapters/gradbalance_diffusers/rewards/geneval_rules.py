"""The rules of GenEval: from detected objects to strict, official and partial-credit scores. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .geneval_request import Entry, Request

Box = tuple[float, float, float, float]

THRESHOLD = 0.3
"""An object counts when its score is above this."""
COUNTING_THRESHOLD = 0.9
"""The same for rows with the tag ``counting``."""
MAX_OBJECTS = 16
"""At most this many objects of a class count, those with the highest scores."""
POSITION_MARGIN = 0.1
"""Part of an offset, as a share of the summed sizes of two objects, that does not make a relation."""


@dataclass(frozen=True, eq=False)
class Detection:
    """An object on a picture.

    Attributes:
        label: Class.
        score: Confidence in [0, 1].
        box: Left, top, right and bottom edge in pixels, right and bottom just outside of the object.
        mask: Its pixels, bool ``[H, W]``; None: the whole box.
        color: Name of its color; None where it was not looked at.
    """

    label: str
    score: float
    box: Box
    mask: NDArray[np.bool_] | None = None
    color: str | None = None


@dataclass(frozen=True)
class Verdict:
    """How well a picture shows what was asked for.

    Attributes:
        strict: Exactly the objects that were asked for: no more and no fewer of the classes named.
        accurate: GenEval's official rule: at least the objects that were asked for, and nothing excluded.
        partial: Partial credit for training, in [0, 1] unless the published quirk was asked for.
        reasons: What is wrong under either rule, in words.
    """

    strict: bool
    accurate: bool
    partial: float
    reasons: tuple[str, ...]


def count_credit(wanted: int, found: int) -> float:
    """Partial credit of a number: 1 - abs(wanted - found) / wanted, not below 0.

    >>> [count_credit(2, n) for n in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return max(0.0, _unclamped_credit(wanted, found))


def relations(box: Box, other: Box) -> set[str]:
    r"""Where ``box`` stands, seen from ``other``: one relation, two on a diagonal, or none.

    With the offset o of the centers and the sizes s of both boxes, per axis,

    $$d = \operatorname{sign}(o) \max(0, |o| - 0.1\,(s_1 + s_2)) / \|o\|_2$$

    A component of d above 0.5 is "right of" or "below", one under -0.5 "left of" or "above".

    >>> relations((0, 0, 10, 10), (30, 5, 40, 15)), sorted(relations((20, 20, 24, 24), (0, 0, 4, 4)))
    ({'left of'}, ['below', 'right of'])
    >>> relations((0, 0, 10, 10), (1, 1, 9, 9))
    set()
    """
    (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) = box, other
    offset = np.array([left + right - left_2 - right_2, top + bottom - top_2 - bottom_2]) / 2
    sizes = np.array([right - left + right_2 - left_2, bottom - top + bottom_2 - top_2])
    reach = np.sign(offset) * np.maximum(np.abs(offset) - POSITION_MARGIN * sizes, 0)
    if np.all(np.abs(reach) < 1e-3):  # pixels
        return set()
    dx, dy = reach / np.linalg.norm(offset)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, true in holds.items() if true}


def select(detections: Iterable[Detection], tag: str | None) -> dict[str, list[Detection]]:
    """The objects that count for a row with this tag, by class, best first."""
    threshold = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        same = found.setdefault(detection.label, [])
        if detection.score > threshold and len(same) < MAX_OBJECTS:
            same.append(detection)
    return found


def needing_color(found: dict[str, list[Detection]], request: Request) -> list[Detection]:
    """The objects whose color :func:`judge` looks at: of a class asked for in a color, the best ``count``."""
    needed: dict[int, Detection] = {}
    for entry in request.include:
        objects = found.get(entry.label, [])
        if entry.color is not None and len(objects) >= entry.count:
            needed |= {id(detection): detection for detection in objects[: entry.count]}
    return list(needed.values())


def judge(found: dict[str, list[Detection]], request: Request, *, published_quirk: bool = False) -> Verdict:
    """Compare the objects on a picture with what was asked for.

    Every entry of ``request.include`` is judged by itself, on all n objects of its class for the strict rule and the
    partial credit, on the best ``count`` of them for the official rule.

    * Count: n equal to ``count`` (strict), at least ``count`` (official).
    * Color, where asked for and the count is right: as many objects of that color as ``count``.
    * Position, where asked for and all before is right: every object has the relation to every object of the entry
      ``target``, which must itself be right.
    * Exclude (official rule): fewer than its count.

    The partial credit is the mean over parts. An entry has one part for its count, one for its color if it has one, one
    for its position if it has one: :func:`count_credit` of the number of objects and of those in the color, and 1 or 0
    for the position. A part that cannot be judged because something before it is wrong gives 0.

    Args:
        found: Objects by class as :func:`select` gives them, with the colors of :func:`needing_color`.
        request: What was asked for.
        published_quirk: Reproduce the partial credit of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470) as it was
            published: not clamped, so down to -14 for one object where 16 are found; a wrong relation adds a part of 0
            and then one of 1; an entry with a wrong count has one part of 0 for color and position together, and one
            with a wrong color has none for its position.

    >>> one = lambda label, left: Detection(label, 0.95, (left, 0, left + 10, 10))
    >>> found = {"cow": [one("cow", 50), one("cow", 80)]}
    >>> judge(found, Request((Entry("cow", 1),)))
    Verdict(strict=False, accurate=True, partial=0.0, reasons=('expected exactly 1 cow, found 2',))
    """
    exact = _judge_entries(found, request, exact=True)
    loose = _judge_entries(found, request, exact=False)
    excess = [
        f"expected fewer than {entry.count} {entry.label}, found {len(found[entry.label])}"
        for entry in request.exclude
        if len(found.get(entry.label, [])) >= entry.count
    ]
    strict = [outcome.reason for outcome in exact if outcome.reason]
    official = [outcome.reason for outcome in loose if outcome.reason] + excess
    parts = [part for outcome in exact for part in (_published_parts if published_quirk else _parts)(outcome)]
    return Verdict(
        strict=not strict,
        accurate=not official,
        partial=sum(parts) / len(parts),
        reasons=tuple(dict.fromkeys(strict + official)),
    )


@dataclass(frozen=True)
class _Outcome:
    """What was seen of one entry; None for what was not asked for or not looked at."""

    entry: Entry
    count: int
    count_right: bool
    colored: int | None
    position: Literal["right", "wrong", "no target"] | None
    reason: str


def _judge_entries(found: dict[str, list[Detection]], request: Request, *, exact: bool) -> list[_Outcome]:
    outcomes: list[_Outcome] = []
    groups: list[Sequence[Detection]] = []  # the objects of every entry so far; none where it is wrong
    for entry in request.include:
        objects = found.get(entry.label, [])
        outcome = _judge_entry(entry, objects if exact else objects[: entry.count], groups, exact=exact)
        outcomes.append(outcome)
        groups.append([] if outcome.reason else objects[: entry.count])
    return outcomes


def _judge_entry(
    entry: Entry, objects: Sequence[Detection], groups: Sequence[Sequence[Detection]], *, exact: bool
) -> _Outcome:
    n, quantity = len(objects), f"{'exactly' if exact else 'at least'} {entry.count}"
    if n != entry.count:
        return _Outcome(entry, n, False, None, None, f"expected {quantity} {entry.label}, found {n}")
    colored = None
    if entry.color is not None:
        colored = sum(detection.color == entry.color for detection in objects)
        if colored != entry.count:
            seen = ", ".join(sorted(str(detection.color) for detection in objects))
            reason = f"expected {quantity} {entry.color} {entry.label}, found {colored} (colors: {seen})"
            return _Outcome(entry, n, True, colored, None, reason)
    if entry.relation is None:
        return _Outcome(entry, n, True, colored, None, "")
    targets = groups[entry.target]
    if not targets:
        reason = f"no right target for {entry.label} to be {entry.relation}"
        return _Outcome(entry, n, True, colored, "no target", reason)
    for detection in objects:
        for target in targets:
            seen_relations = relations(detection.box, target.box)
            if entry.relation not in seen_relations:
                where = " and ".join(sorted(seen_relations)) or "in no relation to it"
                reason = f"expected {entry.label} {entry.relation} {target.label}, found {where}"
                return _Outcome(entry, n, True, colored, "wrong", reason)
    return _Outcome(entry, n, True, colored, "right", "")


def _parts(outcome: _Outcome) -> list[float]:
    entry = outcome.entry
    parts = [count_credit(entry.count, outcome.count)]
    if entry.color is not None:
        parts.append(0.0 if outcome.colored is None else count_credit(entry.count, outcome.colored))
    if entry.relation is not None:
        parts.append(float(outcome.position == "right"))
    return parts


def _published_parts(outcome: _Outcome) -> list[float]:
    entry = outcome.entry
    parts = [_unclamped_credit(entry.count, outcome.count)]
    if not outcome.count_right:
        return parts if entry.color is None and entry.relation is None else [*parts, 0.0]
    if outcome.colored is not None:
        parts.append(_unclamped_credit(entry.count, outcome.colored))
    return parts + {None: [], "right": [1.0], "wrong": [0.0, 1.0], "no target": [0.0]}[outcome.position]


def _unclamped_credit(wanted: int, found: int) -> float:
    return 1 - abs(wanted - found) / wanted
