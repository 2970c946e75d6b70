"""The site builds without a warning, asks for nothing from elsewhere, and shows formulas as formulas."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import docstring_roles
import figures
import mathml
import pictures


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr, done.stderr[-2000:]
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert not [address for address in found if "canonical" not in address], page


def test_formulas_and_roles_are_rendered(site: Path) -> None:
    affine = (site / "affine" / "index.html").read_text(encoding="utf-8")
    assert affine.count("<math") > 20
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        shown = re.sub(r"<(pre|details).*?</\1>", "", text, flags=re.DOTALL)  # sources stay as they are
        assert not re.search(r":(?:class|func|meth|attr|mod|math):", shown), page
        assert 'class="arithmatex"' not in shown, page
        assert not re.search(r"<blockquote>\s*<blockquote>", shown), f"{page}: a doctest shown as a quote"
        assert not re.search(r"<em>[\s.,;:]", shown), f"{page}: an asterisk of a formula taken for emphasis"


def test_limits_stand_below_and_lines_are_aligned() -> None:
    assert "<munder>" in mathml.display(r"\min_{x} y")
    assert "<mtr>" in mathml.display(r"a &= b \\ c &= d")
    assert "<munder>" not in mathml.inline(r"\min_{x} y")


def test_what_cannot_be_rendered_stops_the_build() -> None:
    class page:  # noqa: N801
        class file:  # noqa: N801
            src_uri = "page.md"

    with pytest.raises(ValueError, match=r"page\.md: no MathML"):
        mathml.on_page_content(r'<span class="arithmatex">\(\nosuchcommand x\)</span>', page=page)


def test_roles_of_docstrings_become_markdown() -> None:
    text = "See :class:`~a.b.Thing`, :meth:`step` and :math:`x_k`.\n\n    .. math::\n        a = b\n\n    where"
    assert docstring_roles.translated(text) == (
        "See `Thing`, `step` and $x_k$.\n\n    $$\n    a = b\n    $$\n\n    where"
    )


def test_doctests_are_fenced_where_they_stand() -> None:
    text = "Example:\n    >>> if a:\n    ...     b\n    2\n\n    >>> c\n    <BLANKLINE>\n    3\n\n    Behind."
    assert docstring_roles.translated(text) == (
        "Example:\n    ```pycon\n    >>> if a:\n    ...     b\n    2\n\n    >>> c\n    \n    3\n    ```\n\n    Behind."
    )


@pytest.mark.parametrize("hook", [docstring_roles, figures, pictures], ids=lambda hook: hook.__name__)
def test_examples_of_the_hooks_are_true(hook: ModuleType) -> None:
    found = doctest.testmod(hook)
    assert found.attempted
    assert not found.failed
