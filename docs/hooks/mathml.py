"""Mathematics as MathML at build time: browsers show it by themselves, without a script from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert

_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_SPACE = "{http://www.w3.org/1998/Math/MathML}"
_LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Replace what pymdownx.arithmatex has marked.

    Raises:
        ValueError: A formula with something that the converter does not know: it would stand there as text.
    """

    def mathml(match: re.Match[str]) -> str:
        formula = html.unescape(match[2]).strip()
        try:
            return inline(formula) if match[1] == "span" else display(formula)
        except Exception as error:
            raise ValueError(f"{page.file.src_uri}: no MathML for the formula {formula!r}: {error}") from error

    return _MATH.sub(mathml, content)


def inline(formula: str) -> str:
    """A formula within a line."""
    return _checked(convert(formula))


def display(formula: str) -> str:
    """A formula of its own; several lines with ``&`` and a double backslash are aligned."""
    if "&" in formula and r"\begin" not in formula:
        formula = rf"\begin{{align*}}{formula}\end{{align*}}"
    root = ElementTree.fromstring(_checked(convert(formula, display="block")))
    for element in root.iter():
        name = element.tag.removeprefix(_SPACE)
        if name in _LIMITS and element[0].text in ("min", "max", "argmin", "argmax", "∑"):
            element.tag = _SPACE + _LIMITS[name]
    ElementTree.register_namespace("", _SPACE[1:-1])
    return f'<div class="math">{ElementTree.tostring(root, encoding="unicode")}</div>'


def _checked(mathml: str) -> str:
    if "\\" in mathml:
        raise ValueError(f"an unknown command stays as it is in {mathml}")
    ElementTree.fromstring(mathml)
    return mathml
