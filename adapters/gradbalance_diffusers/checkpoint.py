"""Checkpoints without pickle: LoRA folders that diffusers loads, safetensors, JSON, and a manifest over all of it.

::

    checkpoints/step-000123/
        default/pytorch_lora_weights.safetensors    pipe.load_lora_weights(".../default") works as it is
        old/pytorch_lora_weights.safetensors
        tensors.safetensors                         every other tensor: moments, averages, random states
        state.json                                  everything else
        manifest.json                               size and SHA-256 of every file above, written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from gradbalance.errors import StateError

from .packing import pack, unpack

FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint holds beside the LoRA weights.

    Attributes:
        values: Nested state: epoch, ``state_dict()`` of optimizer, balancer and average, random states, positions in
            the log files. See :func:`gradbalance_diffusers.packing.pack` for what it may hold.
        config: What a resumed run must share, :meth:`gradbalance_diffusers.config.Config.frozen_values`.
    """

    values: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back.

    Attributes:
        path: Its folder.
        step: Optimizer steps done.
        values: As given in :class:`CheckpointState`; tensors on the CPU.
        lora: Folder of the LoRA weights per role, for ``policy.load_lora(folder, role)``.
    """

    path: Path
    step: int
    values: dict[str, Any]
    lora: dict[str, Path]


def save_checkpoint(
    folder: str | Path,
    step: int,
    state: CheckpointState,
    *,
    save_lora: Callable[[Path, Any], None],
    roles: Sequence[str] = ("default", "old"),
    keep: int = 3,
) -> Path:
    """Write a checkpoint so that a crash at any moment leaves either all of it or none of it.

    Everything goes into a hidden folder beside the final one, each file is flushed to the disk, then the folder is
    renamed. Older checkpoints are removed only after that.

    Args:
        folder: The folder of all checkpoints; made if it is missing.
        step: Optimizer steps done. A checkpoint of the same step is replaced.
        state: What to save.
        save_lora: ``save_lora(folder, role)`` writes the LoRA weights of one role into an existing folder.
        roles: The roles to save.
        keep: Newest checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        StateError: ``state`` holds something that cannot be saved; nothing is left behind and nothing is removed.
    """
    folder = Path(folder)
    final, partial, replaced = folder / _name(step), folder / f".{_name(step)}.partial", folder / f".{_name(step)}.old"
    tensors, values = pack(state.values)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):  # of a run that was killed while it saved
        shutil.rmtree(leftover)
    partial.mkdir()
    for role in roles:
        (partial / role).mkdir()
        save_lora(partial / role, role)
    save_file(tensors, partial / _TENSORS)
    record = {"format": FORMAT, "step": step, "roles": list(roles), "config": state.config, "values": values}
    (partial / _STATE).write_text(json.dumps(record, allow_nan=False), "utf-8")
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {path.relative_to(partial).as_posix(): _facts(path) for path in files}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    for path in [*files, partial / _MANIFEST, *(partial / role for role in roles), partial]:
        _flush(path)
    if final.exists():  # damaged, or resume would have continued from it
        final.rename(replaced)
    partial.rename(final)
    _flush(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _checkpoints(folder)[max(1, keep) :]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: str | Path, *, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read a checkpoint after checking every byte of it.

    Args:
        path: The checkpoint's folder.
        config: ``Config.frozen_values()`` of the run that wants to continue; None does not compare.

    Raises:
        StateError: A file is missing, truncated or changed (named), or the checkpoint is from another configuration
            (differing keys named with both values).
    """
    path = Path(path)
    if fault := find_fault(path):
        raise StateError(f"The checkpoint {path} cannot be used: {fault}. Take an older one, or start anew.")
    record = json.loads((path / _STATE).read_text("utf-8"))
    if record["format"] != FORMAT:
        raise StateError(
            f"The checkpoint {path} has format {record['format']}; this version reads {FORMAT}. "
            "Resume with the version that wrote it."
        )
    if config is not None:
        _require_same_config(path, record["config"], config)
    values = unpack(load_file(path / _TENSORS), record["values"])
    return Checkpoint(path, record["step"], values, {role: path / role for role in record["roles"]})


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in ``folder``; None if it has no checkpoint at all.

    A damaged one is skipped with a warning that names it and its fault.

    Raises:
        StateError: There are checkpoints, but every one is damaged.
    """
    faults = []
    for path in _checkpoints(Path(folder)):
        fault = find_fault(path)
        if fault is None:
            return path
        faults.append(f"{path.name}: {fault}")
        warnings.warn(f"Skipping the damaged checkpoint {path}: {fault}.", UserWarning, stacklevel=2)
    if faults:
        raise StateError(f"Every checkpoint in {folder} is damaged ({'; '.join(faults)}). Start anew with --overwrite.")
    return None


def find_fault(path: str | Path) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if they are as they were written."""
    path = Path(path)
    try:
        manifest = json.loads((path / _MANIFEST).read_text("utf-8"))
        expected = {str(name): (facts["size"], facts["sha256"]) for name, facts in manifest.items()}
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{_MANIFEST} is not readable"
    if not {_STATE, _TENSORS} <= set(expected):
        return f"{_MANIFEST} does not list {_STATE} and {_TENSORS}"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _facts(file)["sha256"] != digest:
            return f"{name} was changed after it was written (its SHA-256 differs)"
    return None


def _require_same_config(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(dict(wanted)))
    absent = object()
    keys = [key for key in {**saved, **wanted} if saved.get(key, absent) != wanted.get(key, absent)]
    if keys:
        listing = "; ".join(f"{k}: {saved.get(k, 'absent')!r} there, {wanted.get(k, 'absent')!r} here" for k in keys)
        raise StateError(
            f"The checkpoint {path} is from another configuration ({listing}). "
            "Resume with the configuration it was made with, or start a new run in another folder."
        )


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first; names are ordered by number, as a step may outgrow its six digits."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
