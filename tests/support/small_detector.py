"""A very small random Mask2Former that finds things: not the right ones, but with scores and masks of every kind."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    SwinConfig,
)

SIZE = 64
"""Height and width that pictures are resized to."""


def small_detector(*, labels: int = 80) -> Mask2FormerForUniversalSegmentation:
    """Swin backbone with one block a stage, two decoder layers, 12 queries; sure of its random answers."""
    backbone = SwinConfig(
        image_size=SIZE,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=12,
        num_labels=labels,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        model = Mask2FormerForUniversalSegmentation(config)
        model.class_predictor.weight *= 60
    return model.eval()


def save_small_detector(path: Path, *, labels: int = 80) -> Path:
    """Save a model and its preprocessor configuration to a folder, which is returned."""
    small_detector(labels=labels).save_pretrained(path)
    Mask2FormerImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(path)
    return path
