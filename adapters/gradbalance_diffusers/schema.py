"""Strict reading of nested dataclasses: types, ranges and names are checked, and errors carry the full path."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gradbalance.errors import InvalidArgumentError

SectionT = TypeVar("SectionT", bound="Section")


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for ``Annotated[float, Range(...)]``."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        signs = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None)

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


Positive = Annotated[float, Range(above=0.0)]
NonNegative = Annotated[float, Range(at_least=0.0)]
Fraction = Annotated[float, Range(at_least=0.0, at_most=1.0)]
Decay = Annotated[float, Range(at_least=0.0, below=1.0)]
Count = Annotated[int, Range(at_least=1)]
Natural = Annotated[int, Range(at_least=0)]


class Section:
    """Base of the configuration dataclasses. However one is built, its fields are checked.

    ``section`` is the dotted place of the section in a configuration; error messages begin with it.
    """

    section: ClassVar[str] = ""
    shorthand: ClassVar[str | None] = None
    """A field that a bare string stands for: ``ocr`` then means ``{name: ocr}``."""

    def __post_init__(self) -> None:
        for name, hint in type_hints(type(self)).items():
            object.__setattr__(self, name, coerce(getattr(self, name), hint, join(self.section, name)))
        self.check()

    def check(self) -> None:
        """Rules between fields; overridden where there are some."""


def join(path: str, name: str) -> str:
    """``optimizer`` and ``lr`` to ``optimizer.lr``; the root path is empty."""
    return f"{path}.{name}" if path else name


def type_hints(cls: type[Section]) -> dict[str, Any]:
    """Type of every field, with its ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}  # type: ignore[arg-type]


def read_section(cls: type[SectionT], values: object, path: str = "") -> SectionT:
    """Build ``cls`` from a mapping as YAML gives it, refusing unknown keys, missing fields and wrong types.

    Raises:
        InvalidArgumentError: With the path of the offending field and, for an unknown key, the nearest known one.
    """
    if isinstance(values, str) and cls.shorthand is not None:
        values = {cls.shorthand: values}
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"{_name(path)} must be a mapping of {_keys(cls)}. Found {_found(values)}.")
    hints = type_hints(cls)
    for key in values:
        if key not in hints:
            raise InvalidArgumentError(f"`{join(path, str(key))}` is not a known key. {_nearest(str(key), path, cls)}")
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    for key in required:
        if key not in values:
            raise InvalidArgumentError(
                f"`{join(path, key)}` is missing: it must be {describe(hints[key])} and has no default."
            )
    return cls(**{key: coerce(value, hints[key], join(path, key)) for key, value in values.items()})


def coerce(value: Any, hint: Any, path: str) -> Any:
    """Check ``value`` against a type hint and return it; a list becomes a tuple and an int a float where one is due."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        try:
            inner = coerce(value, arguments[0], path)
        except InvalidArgumentError:
            raise _refused(path, hint, value) from None  # the same fault, with the range in the message
        if inner not in arguments[1]:
            raise _refused(path, hint, value)
        return inner
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (only,) = (a for a in arguments if a is not NoneType)
        return coerce(value, only, path)
    if origin is Literal:
        if value not in arguments:
            close = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
            raise _refused(path, hint, value, f" Did you mean {close[0]!r}?" if close else "")
        return value
    if origin is dict and isinstance(value, Mapping):
        return {
            coerce(key, arguments[0], f"{path} (key)"): coerce(item, arguments[1], f"{path}.{key}")
            for key, item in value.items()
        }
    if origin is list and _is_list(value):
        return [coerce(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is tuple and _is_list(value) and len(value) == len(arguments):
        pairs = zip(value, arguments, strict=True)
        return tuple(coerce(item, argument, f"{path}[{i}]") for i, (item, argument) in enumerate(pairs))
    if isinstance(hint, type) and issubclass(hint, Section):
        return value if isinstance(value, hint) else read_section(hint, value, path)
    if hint is Any or (hint in (bool, str, int) and type(value) is hint):
        return value
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    raise _refused(path, hint, value)


def describe(hint: Any) -> str:
    """A type hint in words, for messages and help.

    >>> describe(Positive), describe(Literal["a", "b"])
    ('a number > 0', "one of 'a', 'b'")
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{describe(arguments[0])} {arguments[1]}"
    if origin in (Union, UnionType):
        return " or ".join("null" if a is NoneType else describe(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin is dict:
        return f"a mapping from {describe(arguments[0])} to {describe(arguments[1])}"
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    if isinstance(hint, type) and issubclass(hint, Section):
        return f"a mapping of {_keys(hint)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(hint, "any value")


def field_docs(cls: type[Section]) -> dict[str, str]:
    """The docstring under every field of a section (a string right after the field, which Python itself drops)."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[statement.target.id] = " ".join(text.split())
    return {field.name: docs.get(field.name, "") for field in fields(cls)}  # type: ignore[arg-type]


def known_paths(cls: type[Section], path: str = "") -> list[str]:
    """Dotted path of every field below ``cls`` that is not itself a section."""
    paths: list[str] = []
    for name, hint in type_hints(cls).items():
        nested = isinstance(hint, type) and issubclass(hint, Section)
        paths += known_paths(hint, join(path, name)) if nested else [join(path, name)]
    return paths


def _nearest(key: str, path: str, cls: type[Section]) -> str:
    close = difflib.get_close_matches(key, list(type_hints(cls)), n=1)
    if close:
        return f"Did you mean `{join(path, close[0])}`? Known keys: {_keys(cls)}."
    deeper = [p for p in known_paths(cls, path) if p.rsplit(".", 1)[-1] == key]
    return (f"Did you mean `{deeper[0]}`? " if deeper else "") + f"Known keys: {_keys(cls)}."


def _keys(cls: type[Section]) -> str:
    return ", ".join(type_hints(cls))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _name(path: str) -> str:
    return f"`{path}`" if path else "A configuration"


def _found(value: object) -> str:
    return "null" if value is None else f"{value!r} ({type(value).__name__})"


def _refused(path: str, hint: Any, value: object, remedy: str = "") -> InvalidArgumentError:
    return InvalidArgumentError(f"`{path}` must be {describe(hint)}. Found {_found(value)}.{remedy}")
