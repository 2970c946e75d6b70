"""Docstrings for the site: Sphinx roles and doctests, which editors and pydoc readers know, as Markdown."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_MATH_BLOCK = re.compile(r"^([ ]*)\.\. math::[ ]*(.*(?:\n(?:\1[ ]+.*|[ ]*(?=\n\1[ ]+\S)))*)", re.MULTILINE)
_MATH = re.compile(r":math:`([^`]+)`", re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data):`~?([^`]+)`")
_DOCTEST = re.compile(r"^([ ]*)>>> .*(?:\n\1[ ]*\S.*|\n[ ]*(?=\n\1>>> ))*", re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Translates each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the object's docstring, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = translated(obj.docstring.value)


def translated(text: str) -> str:
    r"""Markdown for the roles of a docstring, with its doctests fenced: ``>>>`` alone would quote three times over.

    >>> translated(r"See :class:`~a.b.Thing` with :math:`x_k`.")
    'See `Thing` with $x_k$.'
    >>> print(translated("A:\n\n.. math::\n    a = b\n\nwhere"))
    A:
    <BLANKLINE>
    $$
    a = b
    $$
    <BLANKLINE>
    where
    """

    def block(match: re.Match[str]) -> str:
        indent, formula = match[1], textwrap.dedent(match[2]).strip()
        lines = ["$$", *(line.strip() for line in formula.splitlines() if line.strip()), "$$"]
        return "\n".join(f"{indent}{line}" for line in lines)

    def doctest(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```".replace("<BLANKLINE>", "")

    text = _DOCTEST.sub(doctest, text)
    text = _MATH_BLOCK.sub(block, text)
    text = _MATH.sub(lambda match: "$" + re.sub(r"\s*\n\s*", " ", match[1]) + "$", text)
    return _ROLE.sub(
        lambda match: "`" + (match[1].rpartition(".")[2] if match[0].find("`~") > 0 else match[1]) + "`", text
    )
