"""Every model of the sd35-medium preset as a tiny random one of the same class, in the layout it is published in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import BertTokenizer

from blip_reference import ImageRewardReference
from open_clip_reference import randomize
from small_clip import make_letter_tokenizer, make_open_clip, make_small_clip
from small_detector import save_small_detector
from small_sd3 import build_pipeline


def save_stand_ins(folder: Path) -> Path:
    """SD3 with T5, a CLIP, HPSv2.1, an aesthetic predictor, a Mask2Former and ImageReward; ``folder`` is returned."""
    build_pipeline(with_t5=True).save_pretrained(folder / "sd3")
    tokenizer = make_letter_tokenizer()
    make_small_clip(tokenizer).save_pretrained(folder / "clip")
    tokenizer.save_pretrained(folder / "clip")
    torch.save({"state_dict": make_open_clip().state_dict()}, folder / "HPS_v2.1_compressed.pt")
    widths, layers = [24, 1024, 128, 64, 16, 1], (0, 2, 4, 6, 7)
    head = {f"layers.{number}.bias": torch.zeros(widths[i + 1]) for i, number in enumerate(layers)}
    head |= {f"layers.{n}.weight": torch.randn(widths[i + 1], widths[i]) for i, n in enumerate(layers)}
    torch.save(head, folder / "aesthetic.pth")
    save_small_detector(folder / "mask2former")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder / "bert")
    blip = ImageRewardReference(vision=(2, 32, 4, 40, 3, 4), text=(3, 24, 2, 28), vocabulary=len(words) + 2, length=48)
    randomize(blip, 0)
    torch.save(blip.state_dict(), folder / "ImageReward.pt")
    return folder


def stand_in_paths(folder: Path) -> list[str]:
    """Overrides of the preset that put the stand-ins in the place of the published models: paths, and nothing else."""
    clip = {"path": f"{folder}/clip"}
    geneval = {"detector": f"{folder}/mask2former", "clip": f"{folder}/clip"}
    hpsv2 = {"path": f"{folder}/HPS_v2.1_compressed.pt", "tokenizer": f"{folder}/clip"}
    rewards = {"pickscore": clip, "hpsv2": hpsv2, "clipscore": clip, "ocr": {}, "geneval": geneval}
    metrics = rewards | {
        "geneval": geneval | {"score": "accuracy"},
        "aesthetic": clip | {"head": f"{folder}/aesthetic.pth"},
        # Heads are not in a checkpoint: those of the published model are the defaults.
        "imagereward": {
            "path": f"{folder}/ImageReward.pt",
            "tokenizer": f"{folder}/bert",
            "vision_heads": 4,
            "text_heads": 2,
        },
    }
    return [
        f"model.path={folder}/sd3",
        "rewards=" + json.dumps([{"name": name, "options": options} for name, options in rewards.items()]),
        "evaluation.metrics=" + json.dumps([{"name": name, "options": options} for name, options in metrics.items()]),
    ]
