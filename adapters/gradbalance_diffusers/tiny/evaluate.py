"""Samples test prompts from a tiny pipeline and scores them: the report of pre-training."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from torch import Tensor

from gradbalance_diffusers.rewards.geometry import GenEvalGeometry
from gradbalance_diffusers.rewards.ocr import OCR
from gradbalance_diffusers.tiny.prompts import Row, tiny_prompts

SAMPLING_STEPS = 8
BATCH = 64


@torch.no_grad()
def sample_rows(pipeline: StableDiffusion3Pipeline, rows: Sequence[Row], seed: int = 0) -> Tensor:
    """Samples one picture a row without guidance, float32 (n, 3, 32, 32) in [0, 1], with a noise fixed by the seed."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    pictures = []
    for start in range(0, len(rows), BATCH):
        output = pipeline(
            prompt=[row["prompt"] for row in rows[start : start + BATCH]],
            num_inference_steps=SAMPLING_STEPS,
            guidance_scale=1.0,
            max_sequence_length=0,
            generator=generator,
            output_type="pt",
        )
        pictures.append(output.images.float())
    return torch.cat(pictures)


def evaluation_rows(size: int) -> list[Row]:
    """Lists test prompts: `size` of ocr and as many of geneval."""
    return tiny_prompts("test", "ocr", size) + tiny_prompts("test", "geneval", size)


def score_specialists(pictures: Tensor, rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean of the ocr and geneval rewards and the share of pictures that are fully right."""
    prompts = [row["prompt"] for row in rows]
    metadata = {key: [row.get(key) for row in rows] for key in ("source", "include")}
    scores = {
        "ocr": OCR()(pictures, prompts, **metadata),
        "geneval": GenEvalGeometry()(pictures, prompts, **metadata),
        "geneval_strict": GenEvalGeometry(strict=True)(pictures, prompts, **metadata),
    }
    means = {name: float(np.mean([v for v in values if v is not None])) for name, values in scores.items()}
    means["ocr_strict"] = float(np.mean([v == 1 for v in scores["ocr"] if v is not None]))
    return means


def picture_grid(pictures: Tensor, columns: int = 16, scale: int = 3) -> Image.Image:
    """Lays pictures (n, 3, H, W) in [0, 1] out on an enlarged grid; an incomplete last row is dropped."""
    rows = len(pictures) // columns
    array = (pictures[: rows * columns] * 255).round().byte().permute(0, 2, 3, 1).numpy()
    height, width = array.shape[1:3]
    sheet = array.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)
    return Image.fromarray(sheet).resize((sheet.shape[1] * scale, sheet.shape[0] * scale), Image.Resampling.NEAREST)
