"""The code of docs/distributed.md runs, in one process and on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def run_page() -> list[float]:
    """The first block, and that on masks, which goes on from it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), scope)
    losses = list(scope["optimizer"].info.losses.values())
    exec(compile(blocks[1], str(PAGE), "exec"), scope)
    assert scope["loss"].coefficients.shape[0] == 2
    return losses


def test_code_of_the_guide_runs(on_ranks: Any) -> None:
    first, second = on_ranks(2, run_page)
    assert first == second == pytest.approx(run_page(), rel=1e-4)
