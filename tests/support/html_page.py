"""A reader of the HTML pages that reports are."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

Attributes = list[tuple[str, str | None]]


class Balanced(HTMLParser):
    """Fails on tags that do not close, and collects what a page refers to."""

    VOID = frozenset({"meta", "img", "br", "link", "line", "circle", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str | None] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Attributes) -> None:
        self.links += [value for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(path: Path) -> Balanced:
    page = Balanced()
    page.feed(path.read_text("utf-8"))
    assert page.open == []
    return page
