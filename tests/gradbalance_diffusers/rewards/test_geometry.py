import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.geometry import GenEvalGeometry
from gradbalance_diffusers.rewards.objects import find_objects
from gradbalance_diffusers.tiny.palette import COLORS

Object = tuple[str, str, tuple[int, int]]


def picture(*objects: Object, size: int = 32, blur: float = 0.0, background: str = "white") -> torch.Tensor:
    image = Image.new("RGB", (size, size), background)
    draw = ImageDraw.Draw(image)
    r = size // 6
    for shape, color, (x, y) in objects:
        box = (x - r, y - r, x + r, y + r)
        if shape == "circle":
            draw.ellipse(box, fill=COLORS[color])
        elif shape == "square":
            draw.rectangle(box, fill=COLORS[color])
        else:
            draw.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=COLORS[color])
    image = image.filter(ImageFilter.GaussianBlur(blur))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def entry(count: int, color: str, shape: str, **more) -> dict:
    return {"class": shape, "count": count, "color": color} | more


LEFT, RIGHT, LOW = (8, 8), (24, 8), (8, 24)
TWO_BLUE_SQUARES = [entry(2, "blue", "square")]
RED_LEFT_OF_BLUE = [entry(1, "blue", "square"), entry(1, "red", "circle", position=["left of", 0])]


def score(image: torch.Tensor, include: list[dict] | None, strict: bool = False) -> float | None:
    return GenEvalGeometry(strict)(image[None], [""], include=[include])[0]


@pytest.mark.parametrize(
    ("objects", "include", "partial", "strict"),
    [
        ([("square", "blue", LEFT), ("square", "blue", RIGHT)], TWO_BLUE_SQUARES, 1, 1),
        ([("square", "blue", LEFT)], TWO_BLUE_SQUARES, 0.25, 0),  # count (1/2, 0)
        ([("square", "blue", LEFT), ("square", "red", RIGHT)], TWO_BLUE_SQUARES, 0.75, 0),  # color (1, 1/2)
        ([("circle", "blue", LEFT), ("circle", "blue", RIGHT)], TWO_BLUE_SQUARES, 0, 0),  # shape
        ([("square", "blue", LEFT), ("square", "blue", RIGHT), ("circle", "red", LOW)], TWO_BLUE_SQUARES, 1, 0),
        ([], TWO_BLUE_SQUARES, 0, 0),
        ([("circle", "red", LEFT), ("square", "blue", RIGHT)], RED_LEFT_OF_BLUE, 1, 1),
        ([("square", "blue", LEFT), ("circle", "red", RIGHT)], RED_LEFT_OF_BLUE, 0.8, 0),  # relation
        ([("circle", "red", LEFT), ("square", "blue", LOW)], RED_LEFT_OF_BLUE, 0.8, 0),
        ([("circle", "red", LEFT)], RED_LEFT_OF_BLUE, 0.4, 0),  # nothing to be left of
    ],
)
def test_known_pictures(objects, include, partial, strict):
    image = picture(*objects)
    assert score(image, include) == pytest.approx(partial)
    assert score(image, include, strict=True) == strict


@pytest.mark.parametrize(
    ("relation", "subject", "other"),
    [("left of", LEFT, RIGHT), ("right of", RIGHT, LEFT), ("above", LEFT, LOW), ("below", LOW, LEFT)],
)
def test_every_relation_and_its_reverse(relation, subject, other):
    include = [entry(1, "green", "triangle"), entry(1, "cyan", "circle", position=[relation, 0])]
    right = picture(("circle", "cyan", subject), ("triangle", "green", other))
    reverse = picture(("circle", "cyan", other), ("triangle", "green", subject))
    assert score(right, include) == 1.0
    assert score(reverse, include) == pytest.approx(0.8)


def test_equal_shapes_are_told_apart_by_color():
    include = [entry(1, "red", "circle"), entry(1, "blue", "circle")]
    assert score(picture(("circle", "blue", LEFT), ("circle", "red", RIGHT)), include) == 1.0
    assert score(picture(("circle", "red", LEFT), ("circle", "green", RIGHT)), include) == pytest.approx(0.75)


@pytest.mark.parametrize("background", ["white", "gray", "black"])
@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("shape", ["circle", "square", "triangle"])
def test_every_object_is_recognized_when_blurred(shape, color, background):
    image = picture((shape, color, (16, 16)), blur=0.7, background=background)
    (found,) = find_objects(image.permute(1, 2, 0).double().numpy())
    assert (found.shape, found.color) == (shape, color)


@pytest.mark.parametrize("size", [24, 64, 256])
def test_other_sizes(size):
    image = picture(
        ("square", "blue", (size // 4, size // 4)), ("square", "blue", (3 * size // 4, 3 * size // 4)), size=size
    )
    assert score(image, TWO_BLUE_SQUARES) == 1.0


def test_no_include_is_not_applicable():
    image = picture(("square", "blue", LEFT))
    assert score(image, None) is None
    assert GenEvalGeometry()(image[None], [""]) == [None]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"class": "dog", "count": 1}, "class must be one of"),
        ({"class": "square", "count": 0}, "count must be a positive integer"),
        ({"class": "square", "count": 1, "position": ["near", 0]}, "position must be"),
        ({"class": "square", "count": 1, "position": ["above", 3]}, "position must be"),
    ],
)
def test_bad_include_is_refused(bad, message):
    with pytest.raises(InvalidArgumentError, match=message):
        score(picture(), [bad])
