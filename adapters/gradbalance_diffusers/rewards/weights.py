"""Finds and reads weight files that are not in the layout of transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gradbalance.errors import InvalidArgumentError

from .models import cannot_load, first_line


def find_file(path: str | Path, filename: str, *, revision: str | None = None, parameter: str = "path") -> Path:
    """The local file meant by ``path``, downloaded if need be.

    Args:
        path: A file; or a folder or hub id that has ``filename``.
        filename: Name of the file in a folder or on the hub.
        revision: Branch, tag or commit on the hub. None: its main branch.
        parameter: What an error calls ``path``.

    Raises:
        InvalidArgumentError: There is no such file.
    """
    local = Path(path).expanduser()
    if local.is_file():
        return local
    if local.is_dir():
        if (local / filename).is_file():
            return local / filename
        raise InvalidArgumentError(
            f"`{parameter}` must be a weight file, or a folder with {filename!r}. Found the folder {str(path)!r} "
            "without it. Pass the file itself if it has another name."
        )
    try:
        return Path(hf_hub_download(str(path), filename, revision=revision))
    except (OSError, ValueError) as error:
        raise cannot_load(parameter, path, f"the file {filename!r}", error, filename=filename) from error


def read_weights(file: Path, *, parameter: str = "path") -> dict[str, Tensor]:
    """The tensors of a safetensors or torch file, on the CPU; those under ``"state_dict"`` if it has that entry.

    A torch file is read with ``weights_only=True``: one that holds anything but tensors and plain values, which could
    run code while being read, is refused.

    Raises:
        InvalidArgumentError: It is neither, or holds something else than named tensors.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, SafetensorError) as error:
        raise InvalidArgumentError(
            f"`{parameter}` must be a safetensors file, or a torch file of tensors and plain values only: it is read "
            f"with weights_only=True, so that it cannot run code. Found {str(file)!r}: {first_line(error)} Get it from "
            "its publisher again, or save its tensors with safetensors.torch.save_file."
        ) from error
    tensors = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InvalidArgumentError(
            f"`{parameter}` must hold named tensors, at the top or under 'state_dict'. Found {str(file)!r} with a "
            f"{type(tensors).__name__}{'' if not isinstance(tensors, dict) else f' with entries {list(tensors)[:5]}'}."
        )
    return tensors


def check_keys(found: set[str], expected: set[str], *, file: Path, layout: str, parameter: str = "path") -> None:
    """Every expected tensor is there, and no other.

    Raises:
        InvalidArgumentError: Some are missing or unknown; the first of each are named.
    """
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise InvalidArgumentError(
            f"`{parameter}` must hold the tensors of {layout}, each once and no others. Found {str(file)!r} with "
            f"{len(missing)} missing{_some(missing)} and {len(unknown)} unknown{_some(unknown)}."
        )


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""
