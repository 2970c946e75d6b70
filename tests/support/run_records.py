"""What two trainings that differ by rounding only must agree on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def logged(folder: Path) -> list[Any]:
    """All that is written of rewards, balance and evaluations."""
    evaluations = [json.loads(file.read_text()) for file in sorted(folder.glob("evaluations/*.json"))]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] + evaluations


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_close(found[i], value, f"{where}/{i}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=2e-3, abs_tol=2e-5), f"{where}: {found}, not {expected}"
    else:
        assert found == expected, where
