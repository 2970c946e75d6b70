"""The example runs offline and shows every method."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl_grpo.py"


# The example silences what TRL still uses of transformers' old names; pytest's own filters come after it.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_prints_its_table_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", "--seeds", "1", "--steps", "2", "--output", str(tmp_path)])
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    # Random weights are good enough here.
    monkeypatch.setitem(main.__globals__, "pretrained", without_pretraining(main.__globals__["pretrained"]))
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]][:4] == list(main.__globals__["METHODS"])
    assert (tmp_path / "rewards.png").stat().st_size > 10_000


def without_pretraining(pretrained):
    return lambda characters, steps=0: pretrained(characters, steps=0)
