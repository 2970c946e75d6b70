"""The README's example and the supervised example run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 32
    exec(compile(code, "README.md", "exec"), {})
    assert "('kind', 'size')" in capsys.readouterr().out


def test_multitask_example_prints_its_table_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["multitask.py", "--seeds", "2", "--epochs", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "examples" / "multitask.py"), run_name="__main__")
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[1:6]] == ["alone", "sum", "MGDA", "NashMTL", "MARBLE"]
    assert (tmp_path / "multitask.png").stat().st_size > 10_000
