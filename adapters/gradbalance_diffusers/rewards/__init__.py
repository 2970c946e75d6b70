"""Rewards for text-to-image models. Nothing heavy is imported before a reward is used."""

from __future__ import annotations

import difflib
import importlib
import inspect
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
        InvalidArgumentError: Unknown name, a module or attribute that does not exist, or options that it does not take.
        MissingDependencyError: A package that the reward needs is not installed.

    >>> make_reward("datetime:timedelta", days=2).days
    2
    """
    check_reward_name(name)
    make = _load_own(name) if ":" in name else _load(_NAMES[name])
    _check_options(name, make, kwargs)
    return make(**kwargs)


def check_reward_name(name: str) -> None:
    """Without importing anything: is it a name that :func:`make_reward` knows, or could it be one of your own?

    Raises:
        InvalidArgumentError: Neither.

    >>> check_reward_name("ocr"), check_reward_name("package.module:attribute")
    (None, None)
    """
    if ":" not in name and name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise InvalidArgumentError(
            f"A reward must be one of {list(_NAMES)} or 'package.module:attribute'. Found {name!r}. {hint}".rstrip()
        )


def __getattr__(attribute: str) -> Any:
    if attribute in _CLASSES:
        return _load(attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


def _check_options(name: str, make: Callable[..., Any], options: dict[str, Any]) -> None:
    maker = " It must be a class or function that returns a reward, not the reward itself." if ":" in name else ""
    try:
        signature = inspect.signature(make)
    except ValueError:  # some classes written in C do not tell
        return
    except TypeError as error:
        raise InvalidArgumentError(f"The reward {name!r} cannot be made: {error}.{maker}") from None
    try:
        signature.bind(**options)
    except TypeError as error:
        known = list(signature.parameters)
        near = [close for key in options if key not in known for close in difflib.get_close_matches(key, known, n=1)]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidArgumentError(
            f"The options of the reward {name!r} must be among {known}. Found {list(options)}: {error}.{hint}{maker}"
        ) from None


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
