"""Operations of an epoch from shapes alone, and the time they take at a stated speed."""

from __future__ import annotations

from .balance import WEIGHTED_SUM
from .config import Config
from .model_shapes import ModelShapes

UTILIZATION = 0.4
"""Share of the peak speed that transformers usually reach. An assumption, not a measurement."""
GPU_TFLOPS = {
    "T4": 65.0,
    "V100": 125.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.0,
    "A10": 125.0,
    "L4": 121.0,
    "L40S": 362.0,
    "A100": 312.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Peak of dense half-precision matrix products in 10^12 operations a second, from the data sheets."""

# The backward pass of a frozen network with LoRA, in forward passes: gradients of activations only, and a little more
# for attention, whose backward is more than its forward, and for LoRA.
BACKWARD = 1.2


def epoch_flops(shapes: ModelShapes, config: Config) -> dict[str, float]:
    """Floating-point operations of an epoch by phase, over all processes; reward models are not counted.

    Training takes, per picture and noise level, forward passes of the old, the trained and (with a KL weight) the
    reference policy, one backward pass, and with gradient checkpointing the forward once more. A refresh has a backward
    pass for each of the M terms of the loss (1 centered, else 2), or one for each of the K rewards with
    ``balance.collector: passes``.
    """
    pictures = config.prompts.groups_per_epoch * config.prompts.images_per_prompt
    forward = float(shapes.forward_flops)
    backward = forward * (BACKWARD + config.model.gradient_checkpointing)
    guidance = 1 if config.sampling.guidance_scale == 1.0 else 2
    held_out = config.evaluation.prompts_per_source * len(config.evaluation.sources)
    pairs = pictures * config.timesteps.per_image
    evaluation = held_out * (config.evaluation.steps * guidance * forward + shapes.decode_flops)
    return {
        "sampling": pictures * config.sampling.steps * guidance * forward,
        "decoding": float(pictures * shapes.decode_flops),
        "training": pairs * ((3 if config.loss.kl_weight else 2) * forward + backward),
        "refreshes, on average": pairs * (_passes(config) - 1) * backward * _refresh_share(config),
        "evaluation, on average": evaluation / config.evaluation.every,
    }


def find_gpu(name: str) -> str | None:
    """The entry of :data:`GPU_TFLOPS` that a device name contains.

    >>> find_gpu("NVIDIA L40S"), find_gpu("NVIDIA H100 80GB HBM3"), find_gpu("Some Card")
    ('L40S', 'H100', None)
    """
    found = [gpu for gpu in GPU_TFLOPS if gpu in name]
    return max(found, key=len, default=None)


def seconds(flops: float, gpu: str, gpus: int = 1, utilization: float = UTILIZATION) -> float:
    """Time of ``flops`` operations on ``gpus`` cards of a kind, communication not counted.

    >>> seconds(989e12, "H100", gpus=2, utilization=0.5)
    1.0
    """
    return flops / (GPU_TFLOPS[gpu] * 1e12 * utilization * gpus)


def _passes(config: Config) -> int:
    """Backward passes of a refresh."""
    if config.balance.method == WEIGHTED_SUM:
        return 1
    return len(config.rewards) if config.balance.collector == "passes" else 1 if config.loss.center else 2


def _refresh_share(config: Config) -> float:
    """Share of optimizer steps that refresh."""
    return 1.0 if config.balance.method.startswith("mgda") else 1.0 / config.balance.interval
