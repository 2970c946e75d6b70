"""Saves a tiny pipeline in the form that is shipped: half-precision weights that plain `from_pretrained` loads."""

import json
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from transformers import T5Config, T5EncoderModel, T5Tokenizer

_T5_PIECES = ["<pad>", "</s>", "<unk>", "▁"]


def save_pipeline(pipeline: StableDiffusion3Pipeline, folder: Path) -> None:
    """Writes the pipeline with float16 weights.

    The weights of the pipeline are rounded to float16 on the way. Two things make the folder loadable without
    arguments: `StableDiffusion3Pipeline` accepts no folder that lacks the third text encoder, so a silent one is
    added; and text encoders would come back in float16 beside float32 diffusers models, so their configuration asks
    for float32.

    Args:
        pipeline: Pipeline without a T5 encoder.
        folder: Folder to write to.
    """
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.half()
    encoder, tokenizer = silent_t5(pipeline.transformer.config.joint_attention_dim)
    optional = {"image_encoder": None, "feature_extractor": None}
    whole = StableDiffusion3Pipeline(**parts, text_encoder_3=encoder.half(), tokenizer_3=tokenizer, **optional)
    whole.save_pretrained(folder, safe_serialization=True)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        file = folder / name / "config.json"
        config = json.loads(file.read_text()) | {"dtype": "float32"}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def silent_t5(width: int) -> tuple[T5EncoderModel, T5Tokenizer]:
    """Builds a T5 encoder whose output is zero: just what the pipeline puts in the place of a missing one.

    Args:
        width: Width of the output, the `joint_attention_dim` of the transformer.

    Returns:
        The encoder and a tokenizer that knows no word.
    """
    tokenizer = T5Tokenizer(vocab=[(piece, 0.0) for piece in _T5_PIECES], extra_ids=0)
    config = T5Config(vocab_size=len(_T5_PIECES), d_model=width, d_kv=1, d_ff=1, num_layers=1, num_heads=1)
    encoder = T5EncoderModel(config)
    torch.nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder, tokenizer
