"""Rewards by the names that configurations use."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gradbalance.errors import InvalidArgumentError, MissingDependencyError
from gradbalance_diffusers import rewards as rewards_package
from gradbalance_diffusers.rewards import Reward, make_reward


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'saturaton'.*Did you mean 'saturation'"):
        make_reward("saturaton")
    with pytest.raises(InvalidArgumentError, match=r"'jpeg_compressibility'.*Found 'zzz'\.$"):
        make_reward("zzz")


@pytest.mark.parametrize("name", rewards_package._NAMES)
def test_every_name_leads_to_a_class_of_rewards(name: str) -> None:
    reward_class = getattr(rewards_package, rewards_package._NAMES[name])
    assert isinstance(reward_class.name, str)
    assert callable(reward_class.__call__)


@pytest.mark.parametrize(
    "name", ["ocr", "geneval_geometry", "saturation", "contrast", "background", "jpeg_compressibility"]
)
def test_a_name_without_weights_makes_a_reward(name: str) -> None:
    reward = make_reward(name)
    assert isinstance(reward, Reward)
    assert isinstance(reward, getattr(rewards_package, rewards_package._NAMES[name]))


def test_every_class_has_a_name_and_is_public() -> None:
    assert set(rewards_package._NAMES.values()) == set(rewards_package._CLASSES)
    assert set(rewards_package._CLASSES) < set(rewards_package.__all__)


def test_own_reward() -> None:
    assert make_reward("fractions:Fraction", numerator=1, denominator=2) == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ocr", {"thread": 2}, r"'ocr' must be among \['threads'.*Found \['thread'\].*Did you mean 'threads'\?$"),
        ("http", {}, r"Found \[\]: missing a required argument: 'url'\.$"),
        ("statistics:fmean", {}, "argument: 'data'.*returns a reward, not the reward itself"),
        ("math:pi", {}, "not a callable object.*returns a reward"),
    ],
)
def test_options_that_it_does_not_take(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_reward(name, **options)


@pytest.mark.parametrize("path", ["no_such_package:X", "math.no_such:X", "fractions:NoSuch"])
def test_own_reward_that_does_not_exist(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Check the spelling"):
        make_reward(path)


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(rewards_package.importlib, "import_module", absent)
    with pytest.raises(MissingDependencyError, match=r'pip install "gradbalance\[diffusers\]"'):
        make_reward("geneval_geometry")


def test_unknown_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="NoSuchReward"):
        _ = rewards_package.NoSuchReward


def test_importing_the_package_imports_no_engine() -> None:
    code = (
        "import sys, gradbalance_diffusers.rewards\n"
        "assert not {'rapidocr', 'onnxruntime', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
