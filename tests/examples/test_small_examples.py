"""The supervised example and that of a balancer run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_custom_balancer_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "custom_balancer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "IMTLG keeps its 10 claims" in printed
    assert "non_negative_weights: No weight is negative." in printed
    final = [float(value) for value in re.findall(r"scale: \[(.*)\]", printed)[0].split(",")]
    assert final == pytest.approx([2.0, 2.0], abs=0.2)


def test_multitask_example_prints_its_table_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["multitask.py", "--seeds", "2", "--epochs", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "examples" / "multitask.py"), run_name="__main__")
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[1:6]] == ["alone", "sum", "MGDA", "NashMTL", "MARBLE"]
    assert (tmp_path / "multitask.png").stat().st_size > 10_000
