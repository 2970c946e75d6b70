"""Memory that a run will need, from shapes alone. Tensors are counted; activations are estimates and marked as such."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .balance import CONFLICT_GROUPS, WEIGHTED_SUM
from .config import Config
from .model_shapes import ModelShapes

Phase = Literal["always", "encoding", "sampling", "decoding", "training", "refresh", "evaluation"]

# Bytes that a transformer block with LoRA keeps for the backward pass, per token and unit of width, in float32 and
# under half-precision autocast: measured with saved-tensor hooks, which tests/.../test_estimate.py repeats.
_BLOCK_BYTES = {4: 56.5, 2: 40.3}
_DUAL_BYTES = {4: 24.6, 2: 20.5}
# Numbers per token and unit of width that are alive while a block runs without gradient: the feed-forward network's 4
# before and after its activation function, the streams, and a norm's input in float32.
_FORWARD_NUMBERS = 14
# Feature maps of the widest kind that are alive in the last block of the decoder: input, norm, activation, output.
_DECODER_MAPS = 4


@dataclass(frozen=True)
class MemoryItem:
    """One thing that takes memory.

    Attributes:
        name: What it is.
        bytes: How much.
        phase: When it is there; rows of rewards ("refresh") are there while training.
        place: Memory of the device, or of the host, per process.
        exact: Counted from shapes; else an estimate.
    """

    name: str
    bytes: int
    phase: Phase
    place: Literal["device", "host"] = "device"
    exact: bool = True


def memory_items(shapes: ModelShapes, config: Config, gpus: int = 1) -> list[MemoryItem]:
    """Everything that one of ``gpus`` processes keeps, but for reward models, the CUDA context and fragmentation."""
    return [*_weights(shapes, config), *_samples(shapes, config, gpus), *_training(shapes, config, gpus)]


def peak_bytes(items: Iterable[MemoryItem], place: Literal["device", "host"] = "device") -> int:
    """Memory in the phase that needs most.

    >>> items = [MemoryItem("a", 5, "always"), MemoryItem("b", 2, "training"), MemoryItem("c", 1, "refresh")]
    >>> peak_bytes([*items, MemoryItem("d", 2, "sampling"), MemoryItem("e", 9, "always", "host")])
    8
    """
    sums: dict[str, int] = {}
    for item in items:
        if item.place == place:
            phase = "training" if item.phase == "refresh" else item.phase
            sums[phase] = sums.get(phase, 0) + item.bytes
    return sums.pop("always", 0) + max(sums.values(), default=0)


def samples_per_process(config: Config, gpus: int) -> int:
    """Pictures of an epoch that one process samples and trains on."""
    return math.ceil(config.prompts.groups_per_epoch * config.prompts.images_per_prompt / gpus)


def activation_bytes(shapes: ModelShapes, *, element: Literal[2, 4], checkpointing: bool) -> int:
    """What the transformer keeps of one picture between the forward and the backward pass.

    Args:
        shapes: Sizes of the model.
        element: Bytes of a number in matrix products: 2 under half-precision autocast, else 4.
        checkpointing: Only the streams between blocks are kept, and one block while it runs again.
    """
    tokens = shapes.image_tokens + shapes.text_tokens
    block = tokens * shapes.width * _BLOCK_BYTES[element]
    dual = shapes.image_tokens * shapes.width * _DUAL_BYTES[element]
    if checkpointing:
        return int(shapes.layers * tokens * shapes.width * element + block + (dual if shapes.dual_layers else 0))
    return int(shapes.layers * block + shapes.dual_layers * dual)


def _weights(shapes: ModelShapes, config: Config) -> list[MemoryItem]:
    lora, waiting = 4 * shapes.lora_parameters, config.model.text_encoders
    items = [
        MemoryItem("transformer, frozen", shapes.transformer_bytes, "always"),
        MemoryItem("VAE, frozen", shapes.vae_bytes, "always"),
        MemoryItem("text encoders, frozen", shapes.encoder_bytes, "always" if waiting == "keep" else "encoding"),
        MemoryItem("LoRA: trained, old, average", 3 * lora, "always"),
        MemoryItem("AdamW moments", 2 * lora, "always"),
        MemoryItem("trained weights beside the average", lora, "evaluation"),
    ]
    if waiting == "offload":
        items.append(MemoryItem("text encoders while they wait", shapes.encoder_bytes, "always", "host"))
    held_out = config.evaluation.prompts_per_source * len(config.evaluation.sources)
    prompts = config.run.epochs * config.prompts.groups_per_epoch + held_out
    if waiting != "drop" and config.model.cached_prompts:
        prompts = min(prompts, config.model.cached_prompts)
    return [*items, MemoryItem(f"embeddings, at most {prompts:,}", prompts * shapes.embedding_bytes, "always", "host")]


def _samples(shapes: ModelShapes, config: Config, gpus: int) -> list[MemoryItem]:
    samples = samples_per_process(config, gpus)
    drawn = min(config.sampling.batch_size, samples)
    decoded = min(config.sampling.decode_batch_size, drawn)
    pixels, element = math.prod(shapes.image_size), _element(shapes, config)
    tokens = shapes.image_tokens + shapes.text_tokens
    forward = drawn * tokens * shapes.width * _FORWARD_NUMBERS * element
    decoder = decoded * _DECODER_MAPS * shapes.decoder_channels * pixels * shapes.element_bytes
    return [
        MemoryItem(f"clean latents of {samples:,} pictures", samples * 4 * math.prod(shapes.latent_shape), "always"),
        MemoryItem(f"activations, {drawn} pictures", forward, "sampling", exact=False),
        MemoryItem(f"activations of the decoder, {decoded} pictures", decoder, "decoding", exact=False),
        MemoryItem("pictures that wait for rewards, at most", samples * 4 * 3 * pixels, "sampling", "host"),
    ]


def _training(shapes: ModelShapes, config: Config, gpus: int) -> list[MemoryItem]:
    lora, element = 4 * shapes.lora_parameters, _element(shapes, config)
    samples = samples_per_process(config, gpus)
    micro = min(config.optimizer.micro_batch_size or samples, samples)
    checkpointing = config.model.gradient_checkpointing
    objectives = 1 if config.balance.method == WEIGHTED_SUM else len(config.rewards)
    activations = micro * activation_bytes(shapes, element=element, checkpointing=checkpointing)
    items = [
        MemoryItem("LoRA gradients", lora, "training"),
        MemoryItem(f"activations, {micro} pictures", activations, "training", exact=False),
        MemoryItem(f"rows of {objectives} objectives", objectives * lora, "refresh"),
    ]
    if config.balance.measure_conflicts and config.balance.method != WEIGHTED_SUM:
        # The first process alone keeps them.
        items.append(MemoryItem("sums that tell conflicts", CONFLICT_GROUPS * objectives * lora, "always", "host"))
    if element < shapes.element_bytes and not checkpointing:
        # Autocast keeps the half copy of every float32 weight that the backward pass multiplies with.
        items.append(MemoryItem("half copies of the weights", shapes.transformer_bytes // 2, "training", exact=False))
    return items


def _element(shapes: ModelShapes, config: Config) -> Literal[2, 4]:
    return 2 if shapes.element_bytes == 2 or config.run.mixed_precision != "no" else 4
