"""GenEval's rules against a table worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.geneval_request import CLASSES, COLORS, RELATIONS, Entry, Request, read_request
from gradbalance_diffusers.rewards.geneval_rules import (
    Detection,
    Verdict,
    count_credit,
    judge,
    needing_color,
    relations,
    select,
)


def see(label: str, color: str | None = None, *, x: float = 0, y: float = 0, score: float = 0.95) -> Detection:
    """An object of 10 x 10 pixels with its top left corner at (x, y)."""
    return Detection(label, score, (x, y, x + 10, y + 10), color=color)


def want(label: str, count: int = 1, color: str | None = None, position: tuple[str, int] | None = None) -> dict:
    row: dict[str, Any] = {"class": label, "count": count}
    return row | ({"color": color} if color else {}) | ({"position": list(position)} if position else {})


def verdict(
    detections: list[Detection],
    include: list[dict],
    exclude: list[dict] | None = None,
    tag: str | None = None,
    **options: bool,
) -> Verdict:
    return judge(select(detections, tag), read_request(include, exclude, tag), **options)


@dataclass
class Case:
    name: str
    include: list[dict]
    detections: list[Detection]
    strict: bool
    accurate: bool
    partial: float
    published: float  # the partial credit with the published quirk
    exclude: list[dict] = field(default_factory=list)
    tag: str | None = None


COW, COWS = want("cow"), [see("cow", x=40 * i) for i in range(20)]
RED_CAR = want("car", 1, "red")
RED_CAR_BLUE_CUP = [want("car", 1, "red"), want("cup", 1, "blue")]
TWO_RED_CUPS = [want("cup", 2, "red")]
LAPTOP_COW = [want("laptop"), want("cow", position=("right of", 0))]
THREE_COUNTED = {"include": [want("dog", 3)], "exclude": [want("dog", 4)], "tag": "counting"}
COLORED_RIGHT = [want("laptop"), want("cow", 1, "red", ("right of", 0))]

TABLE = [
    # One object: 1 - |1 - n| / 1 = 1, 0, -1, ..., -14 (16 are kept of 20).
    Case("one of one", [COW], COWS[:1], True, True, 1, 1),
    Case("none of one", [COW], [], False, False, 0, 0),
    Case("another class", [COW], [see("dog")], False, False, 0, 0),
    Case("two of one", [COW], COWS[:2], False, True, 0, 0),
    Case("three of one", [COW], COWS[:3], False, True, 0, -1),
    Case("twenty of one: sixteen count", [COW], COWS, False, True, 0, -14),
    # Two objects: the mean of two counts.
    Case("both", [COW, want("dog")], [*COWS[:1], see("dog")], True, True, 1, 1),
    Case("one of both", [COW, want("dog")], COWS[:1], False, False, 1 / 2, 1 / 2),
    Case("both and one too many", [COW, want("dog")], [*COWS[:2], see("dog")], False, True, 1 / 2, 1 / 2),
    Case("three cows: -1 and 1", [COW, want("dog")], [*COWS[:3], see("dog")], False, True, 1 / 2, 0),
    # Counting: threshold 0.9, exclude from 4 on. 1 - |3 - n| / 3.
    Case(
        "three dogs", **THREE_COUNTED, detections=[see("dog")] * 3, strict=True, accurate=True,
        partial=1, published=1,
    ),
    Case(
        "two dogs", **THREE_COUNTED, detections=[see("dog")] * 2, strict=False, accurate=False,
        partial=2 / 3, published=2 / 3,
    ),
    Case(
        "four dogs: excluded", **THREE_COUNTED, detections=[see("dog")] * 4, strict=False, accurate=False,
        partial=2 / 3, published=2 / 3,
    ),
    Case(
        "seven dogs", **THREE_COUNTED, detections=[see("dog")] * 7, strict=False, accurate=False,
        partial=0, published=-1 / 3,
    ),
    Case(
        "a fourth dog at 0.9 exactly is none", **THREE_COUNTED,
        detections=[see("dog")] * 3 + [see("dog", score=0.9)], strict=True, accurate=True, partial=1, published=1,
    ),
    Case(
        "the third dog at 0.89 is none", **THREE_COUNTED,
        detections=[see("dog")] * 2 + [see("dog", score=0.89)], strict=False, accurate=False,
        partial=2 / 3, published=2 / 3,
    ),
    Case("0.31 counts elsewhere", [COW], [see("cow", score=0.31)], True, True, 1, 1, tag="single_object"),
    Case("0.3 does not", [COW], [see("cow", score=0.3)], False, False, 0, 0, tag="single_object"),
    Case("exclude of another class", [COW], [*COWS[:1], see("dog")], True, False, 1, 1, exclude=[want("dog")]),
    Case("two of another class, from three on", [COW], [*COWS[:1], *[see("dog")] * 2], True, True, 1, 1,
         exclude=[want("dog", 3)]),
    # Color: a part for the count, a part for the color; the latter 0 where the count is wrong.
    Case("right color", [RED_CAR], [see("car", "red")], True, True, 1, 1),
    Case("wrong color", [RED_CAR], [see("car", "blue")], False, False, 1 / 2, 1 / 2),
    Case("no car", [RED_CAR], [], False, False, 0, 0),
    Case("two red cars", [RED_CAR], [see("car", "red")] * 2, False, True, 0, 0),
    Case("three red cars: -1 and 0", [RED_CAR], [see("car", "red")] * 3, False, True, 0, -1 / 2),
    Case("the better of two cars is blue", [RED_CAR],
         [see("car", "red", score=0.5), see("car", "blue", score=0.8)], False, False, 0, 0),
    Case("the better of two cars is red", [RED_CAR],
         [see("car", "blue", score=0.5), see("car", "red", score=0.8)], False, True, 0, 0),
    Case("two red cups", TWO_RED_CUPS, [see("cup", "red")] * 2, True, True, 1, 1),
    Case("one of two cups red: 1 and 1/2", TWO_RED_CUPS, [see("cup", "red"), see("cup", "pink")],
         False, False, 3 / 4, 3 / 4),
    Case("none of two cups red: 1 and 0", TWO_RED_CUPS, [see("cup", "pink")] * 2, False, False, 1 / 2, 1 / 2),
    Case("one cup: 1/2 and 0", TWO_RED_CUPS, [see("cup", "red")], False, False, 1 / 4, 1 / 4),
    Case("three cups: 1/2 and 0", TWO_RED_CUPS, [see("cup", "red")] * 3, False, True, 1 / 4, 1 / 4),
    Case("two colors", RED_CAR_BLUE_CUP, [see("car", "red"), see("cup", "blue")], True, True, 1, 1),
    Case("colors swapped: 1 0 1 0", RED_CAR_BLUE_CUP, [see("car", "blue"), see("cup", "red")], False, False, .5, .5),
    Case("the cup missing: 1 1 0 0", RED_CAR_BLUE_CUP, [see("car", "red")], False, False, 1 / 2, 1 / 2),
    # Position: parts 1 (laptop), 1 (cow), and one for the position. Published: 0 and then 1 where it is wrong.
    Case("right of", LAPTOP_COW, [see("laptop"), see("cow", x=40)], True, True, 1, 1),
    Case("left instead", LAPTOP_COW, [see("laptop", x=40), see("cow")], False, False, 2 / 3, 3 / 4),
    Case("in no relation", LAPTOP_COW, [see("laptop"), see("cow", x=1)], False, False, 2 / 3, 3 / 4),
    Case("no laptop: 0 1 0", LAPTOP_COW, [see("cow", x=40)], False, False, 1 / 3, 1 / 3),
    Case("no cow: 1 0 0", LAPTOP_COW, [see("laptop")], False, False, 1 / 3, 1 / 3),
    Case("nothing", LAPTOP_COW, [], False, False, 0, 0),
    Case("two laptops: 0 1 0", LAPTOP_COW,
         [see("laptop"), see("laptop", y=20), see("cow", x=40)], False, True, 1 / 3, 1 / 3),
    Case("the weaker cow stands wrong: 1 0 0", LAPTOP_COW,
         [see("laptop", x=40), see("cow", x=80), see("cow", score=0.5)], False, True, 1 / 3, 1 / 3),
    Case("the better cow stands wrong: 1 0 0", LAPTOP_COW,
         [see("laptop", x=40), see("cow"), see("cow", x=80, score=0.5)], False, False, 1 / 3, 1 / 3),
    Case("both cows right of both laptops", [want("laptop", 2), want("cow", 2, None, ("right of", 0))],
         [see("laptop"), see("laptop", y=15), see("cow", x=60), see("cow", x=60, y=15)], True, True, 1, 1),
    Case("one of two cows left of one laptop", [want("laptop", 2), want("cow", 2, None, ("right of", 0))],
         [see("laptop"), see("laptop", x=70), see("cow", x=90), see("cow", x=40)], False, False, 2 / 3, 3 / 4),
    # Color and position in one entry: GenEval's rows have none, so only here do the parts differ from the published.
    Case("all three", COLORED_RIGHT, [see("laptop"), see("cow", "red", x=40)], True, True, 1, 1),
    Case("wrong color: 1 1 0 0, published 1 1 0", COLORED_RIGHT,
         [see("laptop"), see("cow", "white", x=40)], False, False, 1 / 2, 2 / 3),
    Case("no cow: 1 0 0 0, published 1 0 0", COLORED_RIGHT, [see("laptop")], False, False, 1 / 4, 1 / 3),
    # A doubled wish changes nothing, and every wish is judged by itself.
    Case("twice the same wish", [COW, COW], COWS[:1], True, True, 1, 1),
    Case("a red and a blue car are two cars", [RED_CAR, want("car", 1, "blue")],
         [see("car", "red"), see("car", "blue")], False, False, 0, 0),
    Case("what was not asked for is free", [COW], [*COWS[:1], see("dog"), see("person")], True, True, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    seen = verdict(case.detections, case.include, case.exclude, case.tag)
    assert (seen.strict, seen.accurate) == (case.strict, case.accurate)
    assert seen.partial == pytest.approx(case.partial)
    assert bool(seen.reasons) == (not (case.strict and case.accurate))
    quirk = verdict(case.detections, case.include, case.exclude, case.tag, published_quirk=True)
    assert quirk.partial == pytest.approx(case.published)
    assert (quirk.strict, quirk.accurate, quirk.reasons) == (seen.strict, seen.accurate, seen.reasons)


def test_published_example_of_a_wrong_relation() -> None:
    swapped = [see("laptop", x=40), see("cow")]
    assert verdict(swapped, LAPTOP_COW, published_quirk=True).partial == (1 + 1 + 0 + 1) / 4


@pytest.mark.parametrize(
    ("detections", "include", "exclude", "reasons"),
    [
        ([], [COW], [], ("expected exactly 1 cow, found 0", "expected at least 1 cow, found 0")),
        (COWS[:2], [COW], [], ("expected exactly 1 cow, found 2",)),
        (COWS[:2], [COW], [want("cow", 2)],
         ("expected exactly 1 cow, found 2", "expected fewer than 2 cow, found 2")),
        ([see("car", "blue")], [RED_CAR], [],
         ("expected exactly 1 red car, found 0 (colors: blue)", "expected at least 1 red car, found 0 (colors: blue)")),
        ([see("laptop", x=40), see("cow")], LAPTOP_COW, [], ("expected cow right of laptop, found left of",)),
        ([see("laptop"), see("cow", x=1)], LAPTOP_COW, [],
         ("expected cow right of laptop, found in no relation to it",)),
    ],
)  # fmt: skip
def test_reasons(detections, include, exclude, reasons) -> None:
    assert verdict(detections, include, exclude).reasons == reasons


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        # Against (0, 0, 10, 10), center (5, 5): d = sign * (|o| - 0.1 * (w1 + w2)) / |o|.
        ((20, 0, 30, 10), {"right of"}),  # o = 20: (20 - 2) / 20
        ((-20, 0, -10, 10), {"left of"}),
        ((0, 20, 10, 30), {"below"}),
        ((0, -20, 10, -10), {"above"}),
        ((20, 20, 30, 30), {"right of", "below"}),  # 18 / 28.28 = 0.636
        ((-20, 20, -10, 30), {"left of", "below"}),
        ((4, 0, 14, 10), set()),  # o = 4: 2 / 4 = 0.5, not above
        ((4.1, 0, 14.1, 10), {"right of"}),  # 2.1 / 4.1 = 0.512
        ((2, 0, 12, 10), set()),  # within the margin
        ((0, 0, 10, 10), set()),
        ((20, 10, 30, 20), {"right of"}),  # 18 / 22.36 = 0.805, 8 / 22.36 = 0.358
        ((-45, 0, 95, 10), set()),  # o = 20, margin 0.1 * 150 = 15: 5 / 20
    ],
)  # fmt: skip
def test_relations(box, expected) -> None:
    assert relations(box, (0, 0, 10, 10)) == expected


EDGES = st.tuples(*[st.floats(-50, 50)] * 2, *[st.floats(0.1, 40)] * 2)
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@given(EDGES, EDGES)
def test_relations_are_mirrored(a, b) -> None:
    box, other = ((x, y, x + w, y + h) for x, y, w, h in (a, b))
    assert relations(other, box) == {OPPOSITE[name] for name in relations(box, other)}
    assert len(relations(box, other)) <= 2


def test_selection_keeps_the_sixteen_best_in_order() -> None:
    scores = [0.31 + 0.01 * ((7 * i) % 20) for i in range(20)]
    kept = select([see("cow", score=score) for score in scores] + [see("cup", score=0.2)], "colors")
    assert [d.score for d in kept["cow"]] == sorted(scores, reverse=True)[:16]
    assert kept["cup"] == []
    assert len(select([see("cow", score=0.9)], None)["cow"]) == 1


def test_only_the_colors_that_matter_are_asked_for() -> None:
    request = read_request([want("cup", 2, "red"), want("car", 1, "blue"), COW])
    cups = [see("cup", x=20 * i, score=0.9 - 0.1 * i) for i in range(3)]
    found = select([*cups, *COWS[:1]], None)
    assert needing_color(found, request) == cups[:2], "the best two; no cow; no car to look at"
    assert needing_color(select(cups[:1], None), request) == [], "the count is wrong in any case"


LABELS = st.sampled_from(["cow", "cup", "dog"])
SEEN = st.builds(
    see,
    LABELS,
    st.sampled_from(["red", "blue"]),
    x=st.integers(0, 100),
    y=st.integers(0, 100),
    score=st.sampled_from([0.2, 0.5, 0.95]),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    entries: list[Entry] = []
    for i in range(draw(st.integers(1, 3))):
        color = draw(st.none() | st.sampled_from(["red", "blue"]))
        relation = draw(st.none() | st.sampled_from(RELATIONS)) if i else None
        target = draw(st.integers(0, i - 1)) if i else 0
        entries.append(Entry(draw(LABELS), draw(st.integers(1, 4)), color, relation, target))
    tag = draw(st.sampled_from([None, "counting"]))
    return Request(tuple(entries), tag=tag)


@given(st.lists(SEEN, max_size=8), requests())
def test_scores_agree_with_each_other(detections, request) -> None:
    found = select(detections, request.tag)
    seen = judge(found, request)
    assert 0 <= seen.partial <= 1
    assert seen.strict == (seen.partial == 1), "full credit exactly where all is right"
    assert seen.accurate or not seen.strict, "without exclusions the official rule asks for less"
    quirk = judge(found, request, published_quirk=True)
    assert quirk.partial <= 1
    assert (quirk.partial == 1) == seen.strict


@given(st.integers(1, 4), st.integers(0, 16))
def test_count_credit(wanted, found) -> None:
    assert count_credit(wanted, found) == max(0, 1 - abs(wanted - found) / wanted)


def test_names() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert (CLASSES[0], CLASSES[9], CLASSES[79]) == ("person", "traffic light", "toothbrush")
    assert (CLASSES[64], CLASSES[65], CLASSES[66]) == ("computer mouse", "tv remote", "computer keyboard")
    assert len(COLORS) == 10


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ([], "list of one or more mappings"),
        ("cow", "list of one or more mappings"),
        (["cow"], "list of one or more mappings"),
        ([{"count": 1}], "class must be one of GenEval's 80 names of COCO classes. Found None"),
        ([want("mouse")], "Found 'mouse'. Did you mean 'computer mouse'"),
        ([want("cowe")], "Did you mean 'cow'"),
        ([{"class": "cow"}], "count must be a positive integer. Found None for 'cow'"),
        ([want("cow", 0)], "count must be a positive integer"),
        ([want("cow", True)], "count must be a positive integer"),
        ([want("cow", 1, "beige")], "color must be one of red, .*Found 'beige'"),
        ([want("cow", 1, None, ("near", 0))], "position must be"),
        ([COW, want("dog", 1, None, ("near", 0))], r"Found \['near', 0\] for 'dog', entry 1"),
        ([COW, want("dog", 1, None, ("above", 1))], "an earlier entry"),
        ([COW, want("dog", 1, None, ("above", -1))], "an earlier entry"),
        ([COW, want("dog") | {"position": "above"}], "position must be"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(include, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_request(include)


def test_bad_exclusions_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="`exclude`: count"):
        read_request([COW], [want("cow", 0)])
    with pytest.raises(InvalidArgumentError, match="exclude='cow'"):
        read_request([COW], "cow")  # type: ignore[arg-type]
