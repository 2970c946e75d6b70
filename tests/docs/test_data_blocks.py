"""Configurations, messages and differences on the pages are what they say they are."""

from __future__ import annotations

import ast
import importlib
import json

import pytest
import yaml

from gradbalance_diffusers.config import load_config
from pages import Block, blocks


@pytest.mark.parametrize("block", list(blocks("yaml")), ids=str)
def test_yaml_is_a_configuration(block: Block) -> None:
    """A fragment, over the preset that it goes into: every key at the top is one override."""
    # "..." stands for what the preset has.
    text = block.code.replace(", ...}", "}").replace("[...]", "")
    sections = yaml.safe_load(text)
    fragments = []
    for name, value in sections.items():
        if isinstance(value, dict):
            fragments += [f"{name}.{key}={json.dumps(entry)}" for key, entry in value.items() if entry is not None]
        else:
            fragments.append(f"{name}={json.dumps(value)}")
    assert fragments
    if "rewards" in sections:  # what refers to rewards of the preset by name
        names = [entry if isinstance(entry, str) else entry["name"] for entry in sections["rewards"]]
        assert len(set(names)) == len(names)
    assert load_config("sd35-medium", fragments)


@pytest.mark.parametrize("block", list(blocks("json")), ids=str)
def test_json_loads(block: Block) -> None:
    assert json.loads(block.code)


@pytest.mark.parametrize("block", list(blocks("diff")), ids=str)
def test_both_sides_of_a_difference_are_python_with_names_that_exist(block: Block) -> None:
    for sign, other in (("-", "+"), ("+", "-")):
        lines = [line for line in block.code.splitlines() if not line.startswith(other)]
        tree = ast.parse("\n".join(line.removeprefix(sign) for line in lines))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert imports
        for node in imports:
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)
