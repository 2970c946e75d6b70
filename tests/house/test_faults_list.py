"""Every test that docs/decisions/faults.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "decisions" / "faults.md"


def named_tests() -> list[tuple[str, str]]:
    """(file, test); a name without a file belongs to the file named last."""
    found, last = [], ""
    for file, test in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", PAGE.read_text(encoding="utf-8")):
        last = file or last
        found.append((last, test))
    return found


def test_named_tests_exist() -> None:
    named = named_tests()
    assert len(named) > 80
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert not missing
