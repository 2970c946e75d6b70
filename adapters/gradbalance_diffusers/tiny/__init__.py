"""The embedded tiny SD3: a real `StableDiffusion3Pipeline` of 1.6 million parameters, and its task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradbalance_diffusers.tiny.prompts import tiny_prompts

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

__all__ = ["load_tiny_sd3", "tiny_prompts", "tiny_sd3_path"]


def tiny_sd3_path() -> Path:
    """Returns the folder of the packaged pipeline, in the layout that `from_pretrained` reads."""
    return Path(__file__).parent / "sd3"


def load_tiny_sd3(**kwargs: Any) -> StableDiffusion3Pipeline:
    """Loads the packaged pipeline with float32 weights, without any network.

    Call it with ``max_sequence_length=0``: the model has no T5 encoder and was trained without the placeholder tokens
    that the pipeline would otherwise put in its place.

    Args:
        **kwargs: Passed on to `StableDiffusion3Pipeline.from_pretrained`.

    Returns:
        The pipeline; it draws 32x32 pictures.

    Example:
        >>> pipeline = load_tiny_sd3()
        >>> pipeline.set_progress_bar_config(disable=True)
        >>> prompt = "two blue squares on a white background"
        >>> picture = pipeline(prompt, num_inference_steps=8, guidance_scale=1.0, max_sequence_length=0).images[0]
        >>> picture.size
        (32, 32)
    """
    from diffusers import StableDiffusion3Pipeline

    options: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None} | kwargs
    return StableDiffusion3Pipeline.from_pretrained(tiny_sd3_path(), **options)
