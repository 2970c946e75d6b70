"""Python on the pages runs, block after block, as a reader would paste it.

Names that a reader has of his own (a model, batches) are made by ``setups/PAGE.py``, which is run first.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from pages import PAGES, blocks, name_of

SETUPS = Path(__file__).parent / "setups"
OTHERS = {"docs/interop.md": ("torchjd", "qpsolvers"), "docs/wrap.md": ("accelerate",)}
"""Pages on packages that are no part of every installation."""
NOT_RUN = {("docs/rewards.md", 0): "two models of several gigabytes, and a second GPU"}
"""Page and number of a block that no test can run, and why."""


def setup_of(page: Path) -> Path:
    """Where the names are made that a page takes for granted."""
    return SETUPS / (name_of(page).removeprefix("docs/").removesuffix(".md").lower().replace("/", "__") + ".py")


def _leave_process_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _forget_accelerator() -> None:
    """The library keeps one state per process, which later tests would find."""
    if "accelerate" in sys.modules:
        state = sys.modules["accelerate"].state
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _forget_compiled() -> None:
    """A model compiled here for one shape would have later ones compiled for any, to other graphs."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


PYTHON = [page for page in PAGES if any(True for _ in blocks("python", page))]


@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_blocks_run_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for package in OTHERS.get(name_of(page), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name_of(page)])
    torch.manual_seed(0)
    request.addfinalizer(_leave_process_group)
    request.addfinalizer(_forget_accelerator)
    request.addfinalizer(_forget_compiled)
    scope: dict[str, Any] = {"__name__": name_of(page)}
    setup = setup_of(page)
    if setup.exists():
        exec(compile(setup.read_text(encoding="utf-8"), str(setup), "exec"), scope)
    for block in blocks("python", page):
        # Errors then name the page and its line.
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        if (block.page, block.number) not in NOT_RUN:
            exec(code, scope)


def test_nothing_is_left_over() -> None:
    assert set(NOT_RUN) <= {(block.page, block.number) for block in blocks("python")}
    assert {path.name for path in SETUPS.glob("*.py")} <= {setup_of(page).name for page in PYTHON}


def test_blocks_say_their_language() -> None:
    """A fence without one is a block that nothing looks at."""
    known = {"python", "bash", "yaml", "json", "diff", "text"}
    for page in PAGES:
        opened, languages = False, []
        for line in page.read_text(encoding="utf-8").splitlines():
            assert not re.match(r"\s+```|\s*~~~", line), f"{name_of(page)}: no test sees a fence like {line!r}"
            if line.startswith("```"):
                opened = not opened
                if opened:
                    languages.append(line[3:])
        assert not opened, f"{name_of(page)}: a fence is not closed"
        assert set(languages) <= known, f"{name_of(page)}: {languages}"
