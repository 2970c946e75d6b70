"""Rewards for text-to-image models. Nothing heavy is imported before a reward is used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from gradbalance.errors import InvalidArgumentError, MissingDependencyError

from .base import OnError, PendingRewards, Reward, RewardError, RewardSet
from .scores import LostScore
from .table import RewardTable

_CLASSES = {
    "PickScore": "pickscore",
    "HPSv2": "hpsv2",
    "CLIPScore": "clipscore",
    "Aesthetic": "aesthetic",
    "OCR": "ocr",
    "GenEval": "geneval",
    "GenEvalGeometry": "geometry",
    "Saturation": "appearance",
    "Contrast": "appearance",
    "Background": "appearance",
    "JPEGCompressibility": "jpeg",
    "ImageReward": "imagereward",
    "UnifiedReward": "unified_reward",
    "HTTPReward": "http_reward",
}
_NAMES = {
    "pickscore": "PickScore",
    "hpsv2": "HPSv2",
    "clipscore": "CLIPScore",
    "aesthetic": "Aesthetic",
    "ocr": "OCR",
    "geneval": "GenEval",
    "geneval_geometry": "GenEvalGeometry",
    "saturation": "Saturation",
    "contrast": "Contrast",
    "background": "Background",
    "jpeg_compressibility": "JPEGCompressibility",
    "imagereward": "ImageReward",
    "unifiedreward": "UnifiedReward",
    "http": "HTTPReward",
}

__all__ = [
    "OCR",
    "Aesthetic",
    "Background",
    "CLIPScore",
    "Contrast",
    "GenEval",
    "GenEvalGeometry",
    "HPSv2",
    "HTTPReward",
    "ImageReward",
    "JPEGCompressibility",
    "LostScore",
    "OnError",
    "PendingRewards",
    "PickScore",
    "Reward",
    "RewardError",
    "RewardSet",
    "RewardTable",
    "Saturation",
    "UnifiedReward",
    "make_reward",
]


def make_reward(name: str, **kwargs: Any) -> Callable[..., Any]:
    """A reward by the name used in configurations.

    Args:
        name: One of those in docs/rewards.md, such as ``"pickscore"`` or ``"ocr"`` (an unknown one gets an error that
            lists them), or ``"package.module:attribute"`` for your own: a class or function that returns a reward.
        **kwargs: Passed to the class.

    Raises:
        InvalidArgumentError: Unknown name, or a module or attribute that does not exist.
        MissingDependencyError: A package that the reward needs is not installed.

    >>> make_reward("datetime:timedelta", days=2).days
    2
    """
    if ":" in name:
        return _load_own(name)(**kwargs)
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise InvalidArgumentError(
            f"A reward must be one of {list(_NAMES)} or 'package.module:attribute'. Found {name!r}. {hint}".rstrip()
        )
    return _load(_NAMES[name])(**kwargs)


def __getattr__(attribute: str) -> Any:
    if attribute in _CLASSES:
        return _load(attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


def _load(class_name: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(f".{_CLASSES[class_name]}", __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gradbalance"):
            raise
        raise MissingDependencyError(
            f'{class_name} needs the package {error.name!r}: pip install "gradbalance[diffusers]"'
        ) from error
    return getattr(module, class_name)


def _load_own(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        # A package missing inside the user's own module is reported as it is.
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(error.name or "?"):
            raise
        raise InvalidArgumentError(
            f"A reward 'package.module:attribute' must name something that can be imported. Found {path!r}: {error}. "
            "Check the spelling, and that the module is on the Python path."
        ) from error
