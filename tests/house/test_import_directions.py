"""The directions of dependence are a decision; this walks the imports and holds the code to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "gradbalance"
ADAPTERS = ROOT / "adapters"

# What a part of the core may import from the core. Anything not listed may import all of the core.
ALLOWED = {
    "errors": set(),
    "gramian": {"errors"},
    "solvers": {"errors", "gramian", "solvers"},
    "balancers": {"errors", "gramian", "solvers", "balancers"},
    "affine": {"errors"},
    "info": {"errors", "gramian"},
    "gradients": {"errors", "gramian", "affine", "gradients"},
}
CORE_DEPENDENCIES = {"torch", "numpy", "scipy", "quadprog", "gradbalance"}
# Imported inside a function, on use, with an error that says how to install it.
ON_USE = {"testing": {"hypothesis"}, "conflict_meter": {"matplotlib"}}


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports anywhere, also inside functions."""
    package = [*path.relative_to(ROOT).with_suffix("").parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names if base == "gradbalance")
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(CORE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


CORE_FILES = sorted(CORE.rglob("*.py"))
ADAPTER_FILES = sorted(ADAPTERS.rglob("*.py"))


def test_there_is_code_to_walk() -> None:
    assert len(CORE_FILES) > 10
    assert len(ADAPTER_FILES) > 10


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_imports_only_its_dependencies(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    foreign = tops - set(sys.stdlib_module_names) - CORE_DEPENDENCIES
    foreign -= ON_USE.get(part_of(path), set())
    assert not foreign


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_parts_depend_in_one_direction(path: Path) -> None:
    allowed = ALLOWED.get(part_of(path))
    if allowed is None:
        return
    inner = {name.split(".")[1] for name in imports(path) if name.startswith("gradbalance.")}
    assert inner <= allowed | {part_of(path)}, f"{path.name} may import {sorted(allowed)} of the core"


@pytest.mark.parametrize("path", ADAPTER_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_adapters_use_public_names_of_the_core_and_not_each_other(path: Path) -> None:
    own = path.relative_to(ADAPTERS).parts[0]
    other = {"gradbalance_diffusers", "gradbalance_trl"} - {own}
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in other
        if top == "gradbalance" and name.count("."):
            module = name.split(".")[1]
            inner = (CORE / f"{module}.py").exists() or (CORE / module).is_dir()
            assert module == "errors" or not inner, f"{path.name} imports {name}; adapters import from `gradbalance`"


def test_core_imports_without_any_extra() -> None:
    """Blocks every optional package in a fresh interpreter, then imports the core."""
    extras = "diffusers transformers peft accelerate trl hypothesis torchjd safetensors PIL yaml tqdm matplotlib"
    block = f"for name in {extras.split()}: sys.modules[name] = None"
    code = f"import sys\n{block}\nimport gradbalance\nassert gradbalance.__all__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
