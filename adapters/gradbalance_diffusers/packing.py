"""Nested state (of optimizers, averages, random generators) as named tensors plus JSON, and back exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbalance.errors import StateError

# What JSON lacks stands in an object with one key that begins with this mark.
_MARK = "$"


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    r"""Split a nested state into tensors and JSON values, without pickle and without loss.

    Args:
        state: Any nesting of dict (keys text or int), list, tuple, tensor, numpy array, bool, int, float, str and None:
            what ``Optimizer.state_dict()``, ``torch.get_rng_state()``, ``random.getstate()`` and
            ``numpy.random.get_state()`` return.

    Returns:
        The tensors by slash-separated path, detached copies on the CPU, contiguous (strides and device are not kept);
        and the rest as JSON values, floats exact through their shortest representation.

    Raises:
        StateError: A value of another type, named by its path. Numpy scalars are among them: they would come back as
            Python numbers and change the precision of what is computed from them.

    >>> tensors, values = pack({"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)})
    >>> list(tensors)
    ['state/0/step']
    >>> unpack(tensors, values)
    {'state': {0: {'step': tensor(3.)}}, 'betas': (0.9, 0.999)}
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(state, "", tensors)


def unpack(tensors: Mapping[str, Tensor], values: Any) -> Any:
    """The state that :func:`pack` split.

    Raises:
        StateError: ``values`` refers to a tensor that is not there.
    """
    if isinstance(values, list):
        return [unpack(tensors, item) for item in values]
    if not isinstance(values, dict):
        return values
    if len(values) != 1 or not (mark := next(iter(values))).startswith(_MARK):
        return {key: unpack(tensors, item) for key, item in values.items()}
    content = values[mark]
    if mark == "$tensor":
        return _tensor(tensors, content)
    if mark == "$array":
        return _tensor(tensors, content).numpy()
    if mark == "$tuple":
        return tuple(unpack(tensors, item) for item in content)
    if mark == "$float":
        return float(content)
    if mark == "$dict":
        return {key: unpack(tensors, item) for key, item in content}
    raise StateError(f"A packed state must hold $tensor, $array, $tuple, $float or $dict. Found {mark!r}.")


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return {"$tensor": _store(value.detach().to("cpu", copy=True).contiguous(), path, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _store(torch.from_numpy(value.copy()), path, tensors)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [_pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _pack_dict(value, path, tensors)
    raise StateError(
        f"A state must hold tensors, arrays, dicts, lists, tuples, numbers, texts and None only. Found "
        f"{type(value).__name__} at {path.lstrip('/') or 'its root'}. Convert it, for example with float() or list()."
    )


def _pack_dict(value: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise StateError(
                f"Keys of a state must be text or int. Found {key!r} ({type(key).__name__}) at "
                f"{path.lstrip('/') or 'its root'}."
            )
    items = [(key, _pack(item, f"{path}/{key}", tensors)) for key, item in value.items()]
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return dict(items)
    return {"$dict": [[key, item] for key, item in items]}


def _store(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    name = path.lstrip("/") or "value"
    while name in tensors:  # {0: a, "0": b}, or a key with a slash in it
        name += "'"
    tensors[name] = tensor
    return name


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise StateError(
            f"A packed state refers to the tensor {name!r}, which is not among the {len(tensors)} tensors."
        )
    return tensors[name]
