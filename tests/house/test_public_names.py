"""Every public name of the core has an entry in the API page."""

import re
from pathlib import Path

import gradbalance as gb

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_api_page_lists_every_public_name() -> None:
    listed = set(re.findall(r"^        - (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    # A page of its own has gradbalance.distributed.
    missing = set(gb.__all__) - listed - {"distributed"}
    assert not missing
