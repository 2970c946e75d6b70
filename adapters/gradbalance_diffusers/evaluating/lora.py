"""LoRA weights to evaluate: read from anywhere, put into a pipeline for a while, and shown to have an effect."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from gradbalance.errors import InvalidArgumentError

from ..checkpoint import latest_checkpoint, load_checkpoint
from .specs import ModelSpec

ADAPTER = "evaluated"
_PREFIX = "transformer."


@dataclass(frozen=True)
class LoRAWeights:
    """LoRA tensors with what they need to be applied.

    Attributes:
        source: Where they come from, for messages.
        tensors: By the names that diffusers uses in files.
        metadata: The adapter's configuration (rank, alpha, ...), None if the file has none.
        notes: What else is known of them: path, step, base model.
    """

    source: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] | None
    notes: dict[str, Any] = field(default_factory=dict)

    def sha256(self) -> str:
        """Digest of names, values and configuration: the same weights have the same digest wherever they lie."""
        # Lists in it, such as target_modules, were sets before they were saved: their order says nothing.
        metadata = {k: sorted(v, key=str) if isinstance(v, list) else v for k, v in (self.metadata or {}).items()}
        digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def read_lora(spec: ModelSpec) -> LoRAWeights | None:
    """The weights of a model; None for the base.

    A run or a checkpoint gives the moving average of its trained weights, which is what training evaluates. (The
    weights as trained are in the folder ``default`` of a checkpoint, which is a LoRA folder of its own.)

    Raises:
        InvalidArgumentError: Nothing readable there, or a file that is not a LoRA for SD3.
        StateError: The checkpoint is damaged.
    """
    if spec.kind == "base":
        return None
    if spec.kind in ("run", "checkpoint"):
        lora = _from_checkpoint(spec)
    else:
        lora = LoRAWeights(spec.source, *_read(spec.source, spec), notes={"path": spec.source})
    _check(lora)
    return lora


@contextlib.contextmanager
def applied(pipeline: StableDiffusion3Pipeline, lora: LoRAWeights | None) -> Iterator[None]:
    """Inside the block the pipeline carries ``lora`` in the precision of its file; afterwards nothing.

    Raises:
        InvalidArgumentError: The weights do not fit the model.
    """
    if lora is None:
        yield
        return
    try:
        try:
            _load(pipeline, lora)
        except (ValueError, RuntimeError, KeyError) as error:
            raise InvalidArgumentError(
                f"The LoRA {lora.source} must fit the base model. Loading it: {error}. Evaluate it on the model that "
                "it was trained on (--model)."
            ) from error
        _check_loaded(pipeline, lora)
        yield
    finally:
        pipeline.unload_lora_weights()


def _from_checkpoint(spec: ModelSpec) -> LoRAWeights:
    path = Path(spec.source)
    if spec.kind == "run":
        newest = latest_checkpoint(path / "checkpoints")
        if newest is None:
            raise InvalidArgumentError(
                f"The run {path} must have a checkpoint to be evaluated. Found none in {path / 'checkpoints'}. "
                "Train on, or lower run.checkpoint_every."
            )
        path = newest
    checkpoint = load_checkpoint(path)
    trained, metadata = _read(str(checkpoint.lora["default"]), spec)
    average = {f"transformer.{name}": tensor for name, tensor in checkpoint.values["ema"]["average"].items()}
    if set(average) != set(trained):
        raise InvalidArgumentError(
            f"The checkpoint {path} must average the LoRA tensors that it holds. Differing names: "
            f"{sorted(set(average) ^ set(trained))[:3]}."
        )
    config = json.loads((path / "state.json").read_text("utf-8"))["config"]
    notes = {
        "path": str(path),
        "step": checkpoint.step,
        "weights": "moving average",
        "trained_on": config.get("model.path"),
    }
    return LoRAWeights(str(path), average, metadata, notes)


def _read(source: str, spec: ModelSpec) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors and configuration of a LoRA as diffusers reads them."""
    place, options = source, {}
    if spec.kind == "hub" and source.count("/") > 1:
        *repository, options["weight_name"] = source.split("/", 2)
        place = "/".join(repository)
    elif spec.kind == "lora" and Path(source).is_dir():
        options["weight_name"] = _only_file(Path(source))
    try:
        tensors, metadata = StableDiffusion3Pipeline.lora_state_dict(
            place, return_lora_metadata=True, use_safetensors=True, **options
        )
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        hint = " There is no such folder or file here, so the hub was asked." if spec.kind == "hub" else ""
        raise InvalidArgumentError(
            f"{source!r} must be a LoRA that diffusers can read.{hint} It says: {error}"
        ) from error
    return tensors, metadata


def _only_file(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if "pytorch_lora_weights.safetensors" in names:
        return "pytorch_lora_weights.safetensors"
    if len(names) > 1:
        raise InvalidArgumentError(f"The folder {folder} must hold one LoRA. Found {names}. Name the file.")
    return names[0]


def _check(lora: LoRAWeights) -> None:
    """The tensors alone tell whether they can have an effect at all."""
    if not lora.tensors:
        raise InvalidArgumentError(f"The LoRA {lora.source} must hold tensors. Found none: it is empty.")
    texts = [name for name in lora.tensors if name.startswith("text_encoder")]
    if texts:
        # transformers 5 loads adapters into its models with peft >= 0.22 only, which is not released.
        raise InvalidArgumentError(
            f"The LoRA {lora.source} must change the transformer only. Found {len(texts)} tensors for text encoders, "
            f"such as {texts[0]!r}, which today's transformers and peft cannot load together. Take a file without them."
        )
    foreign = [name for name in lora.tensors if not name.startswith(_PREFIX)]
    if foreign:
        raise InvalidArgumentError(
            f"The LoRA {lora.source} must name its tensors {_PREFIX}…. Found {foreign[0]!r} ({len(foreign)} such). It "
            "is for another kind of model, or in another format."
        )
    broken = [name for name, tensor in lora.tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise InvalidArgumentError(
            f"The LoRA {lora.source} must hold finite values. Found NaN or Inf in {broken[0]!r}."
        )


def _load(pipeline: StableDiffusion3Pipeline, lora: LoRAWeights) -> None:
    """Put the tensors into the transformer, as ``load_lora_weights`` does, which takes no metadata with tensors."""
    pipeline.load_lora_into_transformer(
        dict(lora.tensors), pipeline.transformer, adapter_name=ADAPTER, metadata=lora.metadata, _pipeline=pipeline
    )


@torch.no_grad()
def _check_loaded(pipeline: StableDiffusion3Pipeline, lora: LoRAWeights) -> None:
    """Every tensor has found its layer, and is there in the precision of the file."""
    places = {
        f"{_PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": parameter
        for name, parameter in pipeline.transformer.named_parameters()
        if f".{ADAPTER}." in name
    }
    factors = {name: tensor for name, tensor in lora.tensors.items() if ".lora_A." in name or ".lora_B." in name}
    homeless = sorted(set(factors) - set(places))
    if homeless:
        raise InvalidArgumentError(
            f"The LoRA {lora.source} must fit the base model. {len(homeless)} of its {len(factors)} tensors have no "
            f"layer there, such as {homeless[0]!r}. Evaluate it on the model that it was trained on (--model)."
        )
    for name, tensor in factors.items():
        # Loading into a half-precision model may have rounded them.
        places[name].data = tensor.to(places[name].device)
        places[name].requires_grad_(False)
