from __future__ import annotations

from pathlib import Path

import pytest

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.evaluating.specs import ModelSpec, parse_spec, parse_specs


def test_what_lies_in_a_folder_decides(trained_run: Path, lora_path: Path) -> None:
    assert parse_spec(str(trained_run)) == ModelSpec("marble", "run", str(trained_run))
    checkpoint = trained_run / "checkpoints" / "step-000003"
    assert parse_spec(str(checkpoint)) == ModelSpec("marble-step-000003", "checkpoint", str(checkpoint))
    assert parse_spec(f"x={checkpoint}").run == trained_run
    assert parse_spec(str(lora_path)) == ModelSpec("lora", "lora", str(lora_path))
    file = lora_path / "pytorch_lora_weights.safetensors"
    assert parse_spec(f"a.b={file}@4.5") == ModelSpec("a.b", "lora", str(file), 4.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base", ModelSpec("base", "base")),
        ("base@4.5", ModelSpec("base-cfg4.5", "base", "", 4.5)),
        ("base@1", ModelSpec("base", "base", "", 1.0)),
        ("org/some-lora", ModelSpec("some-lora", "hub", "org/some-lora")),
        ("mine=org/loras/nft.safetensors", ModelSpec("mine", "hub", "org/loras/nft.safetensors")),
    ],
)
def test_without_a_folder(text: str, expected: ModelSpec) -> None:
    assert parse_spec(text) == expected
    assert parse_spec(text).run is None


@pytest.mark.parametrize("text", ["", "name=", "=base", "nowhere", "./missing/run", "base@0.5"])
def test_what_is_none_of_these_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be"):
        parse_spec(text)


def test_a_folder_with_nothing_to_evaluate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="Found none of these"):
        parse_spec(str(tmp_path))


def test_names_must_differ() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Found \['base'\] twice"):
        parse_specs(["base", "base@1"])
