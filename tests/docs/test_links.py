"""Links within the repository lead somewhere, anchors included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import PAGES, ROOT, name_of, prose

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings as mkdocs and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"[ ]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        inside = page.name == "README.md" or found.is_relative_to(ROOT / "docs")
        assert inside, f"{name_of(page)} links to {target}, which is no part of the site"
        assert not anchor or anchor in anchors(found), (
            f"{name_of(page)} links to {target}; {found.name} has {anchors(found)}"
        )
