"""The code in the guides runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("guide", ["extending.md", "interop.md"])
def test_code_of_the_guide_runs_from_top_to_bottom(guide: str, capsys: pytest.CaptureFixture[str]) -> None:
    if guide == "interop.md":
        pytest.importorskip("torchjd")
        pytest.importorskip("qpsolvers")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / guide).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    scope: dict[str, object] = {"__name__": guide}
    for block in blocks:
        exec(compile(block, guide, "exec"), scope)
    if guide == "extending.md":
        assert "non_conflict: No objective gets worse to first order" in capsys.readouterr().out


def test_custom_balancer_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "custom_balancer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "IMTLG keeps its 10 claims" in printed
    assert "non_negative_weights: No weight is negative." in printed
    final = [float(value) for value in re.findall(r"scale: \[(.*)\]", printed)[0].split(",")]
    assert final == pytest.approx([2.0, 2.0], abs=0.2)
