"""Loads the models of rewards: once for all rewards that use the same one, on the device and in the dtype asked for.

A model is named by a local folder or by its id on the Hugging Face hub. It is loaded when the reward is built, so that
a wrong path, a missing download or a file that does not fit stops the program then and not in the middle of a run.
Weights are read as safetensors, or as a torch file with ``weights_only=True``; a file that would run code is refused.
"""

from __future__ import annotations

import pickle
import re
import threading
import weakref
from collections.abc import Callable, Hashable
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, CLIPModel, PreTrainedModel, PreTrainedTokenizerBase

from gradbalance.errors import InvalidArgumentError

from .clip import CLIP

Model = TypeVar("Model", bound=torch.nn.Module)
Pretrained = TypeVar("Pretrained", bound=PreTrainedModel)

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What a model can compute in, by the names used in configurations."""

_shared: weakref.WeakValueDictionary[Hashable, torch.nn.Module] = weakref.WeakValueDictionary()
_loading = threading.RLock()


def load_clip(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    parameter: str = "path",
) -> CLIP:
    """A CLIP model and its tokenizer; the model is shared as in :func:`load_model`.

    Args:
        path: Folder or hub id of a transformers ``CLIPModel``, such as ``"openai/clip-vit-large-patch14"``.
        tokenizer: Folder or hub id of its tokenizer. None: ``path``.
        revision: As in :func:`load_model`; not used for a ``tokenizer`` of its own.
        dtype: As in :func:`load_model`.
        device: As in :func:`load_model`.
        parameter: What an error calls ``path``.

    Raises:
        InvalidArgumentError: As :func:`load_model`, or a tokenizer that does not belong to the model.
    """
    model = load_model(CLIPModel, path, revision=revision, dtype=dtype, device=device, parameter=parameter)
    if tokenizer is None:
        return CLIP(model, load_tokenizer(path, revision=revision))
    return CLIP(model, load_tokenizer(tokenizer))


def load_model(
    model_class: type[Pretrained],
    path: str | Path,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    parameter: str = "path",
) -> Pretrained:
    """A transformers model for inference, in evaluation mode and without gradients.

    Asked again with the same class, path, revision, dtype and device while the first one is in use, it returns the same
    object: do not change it.

    Args:
        model_class: Class whose ``from_pretrained`` loads it.
        path: Local folder or hub id.
        revision: Branch, tag or commit on the hub. None: its main branch.
        dtype: One of `DTYPES`, or that torch dtype.
        device: Such as ``"cpu"`` or ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        parameter: What an error calls ``path``.

    Raises:
        InvalidArgumentError: ``path`` cannot be loaded or lacks parameters of the class; unknown dtype or device.
    """
    place, number = resolve_device(device), resolve_dtype(dtype)
    location, version = local_or_hub(path), revision or "main"

    def load() -> Pretrained:
        try:
            loaded: Any = model_class.from_pretrained(
                location, revision=version, dtype=number, weights_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
            raise cannot_load(parameter, path, f"a {model_class.__name__}", error) from error
        model, report = loaded
        missing = sorted(set(report["missing_keys"]) & dict(model.named_parameters()).keys())
        if missing:  # transformers would leave them random and only log it
            raise InvalidArgumentError(
                f"`{parameter}` must hold every parameter of a {model_class.__name__}. Found {str(path)!r} without "
                f"{len(missing)} of them, the first {missing[0]!r}. Pass the checkpoint of such a model."
            )
        return cast(Pretrained, model)

    return shared((model_class, location, version, number, place), place, load)


def load_tokenizer(
    path: str | Path, *, revision: str | None = None, parameter: str = "tokenizer"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or hub id; ``parameter`` is what an error calls ``path``.

    Raises:
        InvalidArgumentError: It cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(local_or_hub(path), revision=revision or "main")
    except (OSError, ValueError) as error:
        raise cannot_load(parameter, path, "a tokenizer", error) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # what transformers makes of a folder with the model's config.json only
        raise InvalidArgumentError(
            f"`{parameter}` must be a local path of a tokenizer, or its id on the Hugging Face hub. Found "
            f"{str(path)!r}, which has no vocabulary. Save the tokenizer there, or pass the path of the one that "
            "belongs to the model."
        )
    return tokenizer


def shared(key: Hashable, device: torch.device, load: Callable[[], Model]) -> Model:
    """The model that ``load`` makes, frozen and on ``device``; the same object for the same key while it is in use.

    >>> place = torch.device("cpu")
    >>> one = shared("a layer", place, lambda: torch.nn.Linear(2, 2))
    >>> one is shared("a layer", place, lambda: torch.nn.Linear(2, 2)), one.weight.requires_grad
    (True, False)
    """
    with _loading:
        model = cast("Model | None", _shared.get(key))  # the key stands for the class
        if model is None:
            model = load().eval().requires_grad_(False).to(device)
            _shared[key] = model
        return model


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device meant, with its number, so that "cuda" and "cuda:0" share models.

    >>> resolve_device("cpu")
    device(type='cpu')

    Raises:
        InvalidArgumentError: No such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError where it is built without CUDA
        raise InvalidArgumentError(
            f"`device` must be a device of this machine, such as 'cpu' or 'cuda:0' ({torch.cuda.device_count()} CUDA "
            f"devices found), or None. Found {str(device)!r}: {first_line(error)}"
        ) from error
    if place == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return place


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name.

    >>> resolve_dtype("bfloat16")
    torch.bfloat16

    Raises:
        InvalidArgumentError: Another name or dtype than those of `DTYPES`.
    """
    number = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if number is None or number not in DTYPES.values():
        raise InvalidArgumentError(f"`dtype` must be one of {list(DTYPES)}. Found {dtype!r}.")
    return number


def cannot_load(
    parameter: str, path: str | PathLike[str], what: str, error: BaseException, *, filename: str = ""
) -> InvalidArgumentError:
    """The error for a path or hub id that does not give ``what``: names what was tried and the remedy."""
    rule = (
        f"`{parameter}` must be a local path of {what}, or its id on the Hugging Face hub. Found {str(path)!r}, which"
    )
    if Path(path).expanduser().exists():
        return InvalidArgumentError(f"{rule} is here but cannot be loaded: {first_line(error)}")
    if not _HUB_ID.fullmatch(str(path)):
        return InvalidArgumentError(f"{rule} is not here, and is no hub id. Check the path.")
    download = f"hf download {path} {filename}".rstrip()
    return InvalidArgumentError(
        f"{rule} is not here and could not be had from the hub: {first_line(error)} Check the spelling. If its page "
        "there asks to accept a licence, do so and run `hf auth login`; until then it may look as if it did not exist. "
        "Without network, or with HF_HUB_OFFLINE=1, only what was downloaded before is found: run "
        f"`{download} --local-dir FOLDER` where there is network, and pass {parameter}='FOLDER'."
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def local_or_hub(path: str | PathLike[str]) -> str:
    """The whole local path, ``~`` resolved, if there is one; else ``path`` itself, which may be a hub id."""
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else str(path)
