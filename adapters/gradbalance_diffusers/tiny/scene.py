"""Draws the picture that a prompt of the tiny task asks for."""

import random
import re
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from gradbalance_diffusers.tiny.palette import BACKGROUNDS, COLORS, COOL, SHAPES, WARM
from gradbalance_diffusers.tiny.prompts import Row

SIZE = 32
"""Width and height of a picture, pixels."""
FONT_SIZE = 16
ADVANCE = 9
"""Distance between the centres of two digits, pixels."""
MAX_FADE = 0.4
"""An object is at most this far blended into the background."""
MAX_SHADE = 0.3
"""A background is at most this far blended into middle gray."""

_SCALE = 4  # shapes are drawn this much larger and averaged down: smooth edges
_RADIUS = {"circle": 5.6, "square": 5.0, "triangle": 6.0}
_CELLS = [(8, 8), (24, 8), (8, 24), (24, 24)]
_SIGN = re.compile(r'^an? (\w+) sign that says "(\d+)"')
_GENERAL = re.compile(r"^(?:a|some) (\w+) in (\w+) colors")

Color = tuple[int, int, int]
Placed = tuple[str, str, tuple[float, float]]


def draw_scene(row: Row, rng: random.Random) -> Image.Image:
    """Draws the picture of one prompt row, with a random layout, fade and shade.

    Args:
        row: A row of `tiny_prompts`.
        rng: Source of all chance: layout jitter of one pixel, the fade of the objects (up to `MAX_FADE`) and the
            shade of the background (up to `MAX_SHADE`).

    Returns:
        An RGB picture of `SIZE` x `SIZE` pixels.

    Example:
        >>> from gradbalance_diffusers.tiny.prompts import tiny_prompts
        >>> draw_scene(tiny_prompts("train", "ocr", size=1)[0], random.Random(0)).size
        (32, 32)
    """
    shade, fade = rng.uniform(0, MAX_SHADE), rng.uniform(0, MAX_FADE)
    background = _blend(BACKGROUNDS[row["background"]], (128, 128, 128), shade)
    if row["source"] == "ocr":
        return _draw_sign(row, background, fade, rng)
    objects = _geneval_objects(row, rng) if row["source"] == "geneval" else _general_objects(row, rng)
    canvas = Image.new("RGB", (SIZE * _SCALE, SIZE * _SCALE), background)
    draw = ImageDraw.Draw(canvas)
    for shape, color, center in objects:
        _draw_shape(draw, shape, center, _blend(COLORS[color], background, fade))
    return canvas.reduce(_SCALE)


def _draw_sign(row: Row, background: Color, fade: float, rng: random.Random) -> Image.Image:
    match = _SIGN.match(row["prompt"])
    assert match is not None, row["prompt"]
    color, text = match.groups()
    image = Image.new("RGB", (SIZE, SIZE), background)
    draw = ImageDraw.Draw(image)
    y = SIZE / 2 + rng.choice((-1, 0, 1))
    for i, digit in enumerate(text):
        x = SIZE / 2 + ADVANCE * (i - (len(text) - 1) / 2)
        draw.text((x, y), digit, font=_font(), fill=_blend(COLORS[color], background, fade), anchor="mm")
    return image


def _geneval_objects(row: Row, rng: random.Random) -> list[Placed]:
    include = row["include"]
    if "position" in include[-1]:
        reference, subject = include
        first, second = _related_cells(subject["position"][0], rng)
        placed = [(subject, first), (reference, second)]
    else:
        wanted = [entry for entry in include for _ in range(entry["count"])]
        # In reading order: where the first object of a pair goes is settled by the prompt, not by chance.
        cells = sorted(rng.sample(_CELLS, len(wanted)), key=lambda cell: (cell[1], cell[0]))
        placed = list(zip(wanted, cells, strict=True))
    return [(entry["class"], entry["color"], _jitter(cell, rng)) for entry, cell in placed]


def _related_cells(relation: str, rng: random.Random) -> tuple[tuple[int, int], tuple[int, int]]:
    """Chooses cells for the subject and for the object it relates to."""
    near, far, across = 8, 24, rng.choice((8, 24))
    cells = ((near, across), (far, across)) if relation in ("left of", "right of") else ((across, near), (across, far))
    return cells if relation in ("left of", "above") else (cells[1], cells[0])


def _general_objects(row: Row, rng: random.Random) -> list[Placed]:
    match = _GENERAL.match(row["prompt"])
    assert match is not None, row["prompt"]
    thing, tone = match.groups()
    colors = {"warm": WARM, "cool": COOL}.get(tone, tuple(COLORS))
    shapes = (thing[:-1],) if thing[:-1] in SHAPES else SHAPES
    cells = rng.sample(_CELLS, rng.randint(2, 4))
    return [(rng.choice(shapes), rng.choice(colors), _jitter(cell, rng)) for cell in cells]


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, center: tuple[float, float], color: Color) -> None:
    x, y, r = center[0] * _SCALE, center[1] * _SCALE, _RADIUS[shape] * _SCALE
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=color)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r - 1, y + r - 1), fill=color)
    else:
        draw.polygon([(x, y - r), (x + r, y + 0.9 * r), (x - r, y + 0.9 * r)], fill=color)


def _jitter(cell: tuple[int, int], rng: random.Random) -> tuple[float, float]:
    return cell[0] + rng.choice((-1, 0, 1)), cell[1] + rng.choice((-1, 0, 1))


def _blend(color: Color, other: Color, share: float) -> Color:
    r, g, b = (round((1 - share) * c + share * o) for c, o in zip(color, other, strict=True))
    return r, g, b


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=FONT_SIZE)
