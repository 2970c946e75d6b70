"""Colours, backgrounds and shapes that prompts of the tiny task can name."""

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (222, 36, 40),
    "orange": (246, 140, 16),
    "green": (28, 160, 62),
    "cyan": (16, 182, 196),
    "blue": (40, 88, 232),
    "purple": (152, 48, 196),
}
"""Object colours, 8-bit RGB. All saturated and at least 25 degrees of hue apart, so that a hue match names them."""

WARM = ("red", "orange")
"""Colours of a `warm` picture."""

COOL = ("cyan", "blue")
"""Colours of a `cool` picture."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {"white": (250, 250, 250), "gray": (192, 192, 192), "black": (8, 8, 8)}
"""Background colours, 8-bit RGB. Each keeps a Euclidean distance of at least 120 to every object colour."""

SHAPES = ("circle", "square", "triangle")
"""Classes of objects."""

RELATIONS = ("left of", "right of", "above", "below")
"""Spatial relations between two objects."""

COUNTS = {1: "one", 2: "two", 3: "three"}
"""Number words."""
