"""YAML with the scalars of its version 1.2 core schema, and no key twice.

PyYAML follows version 1.1, in which ``3e-4`` is a text, ``no`` is false and ``1:30`` is 90: traps in a file of
hyper-parameters. Reading and writing use the same rules, so a round trip is exact.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from gradbalance.errors import InvalidArgumentError

_SCALARS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
# The core schema has no octal 010: `010` is ten, which PyYAML's own constructor would read as eight.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", repr(value)))


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # Line breaks of Unicode survive only as escapes, which double quotes alone have.
    style = '"' if any(mark in value for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str, origin: str) -> Any:
    r"""Plain Python values of ``text``.

    Args:
        text: The YAML.
        origin: Where it comes from (a file, an argument), for the error message.

    Raises:
        InvalidArgumentError: Not YAML, or a key that stands twice; with line and column.

    >>> parse_yaml("lr: 3e-4\nmixed_precision: no", "example")
    {'lr': 0.0003, 'mixed_precision': 'no'}
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise InvalidArgumentError(f"{origin}{place}: not valid YAML: {problem}. Correct it there.") from error


def dump_yaml(values: Any) -> str:
    """``values`` (mappings, lists, numbers, texts, null) as YAML that :func:`parse_yaml` reads back exactly."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
