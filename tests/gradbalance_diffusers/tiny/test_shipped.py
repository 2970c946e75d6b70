import socket

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from gradbalance_diffusers.tiny import load_tiny_sd3, tiny_prompts, tiny_sd3_path
from gradbalance_diffusers.tiny.evaluate import evaluation_rows, sample_rows, score_specialists


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    return load_tiny_sd3()


def test_folder_is_small():
    assert sum(file.stat().st_size for file in tiny_sd3_path().rglob("*") if file.is_file()) < 6_000_000


def test_loads_without_a_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_tiny_sd3().transformer.dtype == torch.float32


def test_default_size_is_that_of_the_task(pipeline):
    picture = pipeline(
        tiny_prompts("test", "general", 1)[0]["prompt"],
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=0,
    ).images[0]
    assert picture.size == (32, 32)


def test_plain_from_pretrained_gives_the_same_pictures(pipeline):
    plain = StableDiffusion3Pipeline.from_pretrained(tiny_sd3_path())
    plain.set_progress_bar_config(disable=True)
    assert {getattr(plain, name).dtype for name in ("transformer", "vae", "text_encoder", "text_encoder_2")} == {
        torch.float32
    }
    prompt = tiny_prompts("test", "geneval", 1)[0]["prompt"]
    pictures = [
        each(
            prompt,
            num_inference_steps=2,
            guidance_scale=1.0,
            max_sequence_length=32,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        for each in (plain, pipeline)
    ]
    assert torch.equal(*pictures)


def test_base_is_mediocre_on_purpose(pipeline):
    rows = evaluation_rows(48)
    scores = score_specialists(sample_rows(pipeline, rows), rows)
    assert 0.3 < scores["ocr"] < 0.8
    assert 0.55 < scores["geneval"] < 0.9


def test_autoencoder_keeps_what_the_rewards_look_at(pipeline):
    import random

    from gradbalance_diffusers.tiny.scene import draw_scene
    from gradbalance_diffusers.tiny.train_vae import decode, encode

    rng, rows = random.Random(0), evaluation_rows(64)
    clean = torch.stack([torch.from_numpy(np.array(draw_scene(row, rng))).permute(2, 0, 1) for row in rows])
    scores = score_specialists(decode(pipeline.vae, encode(pipeline.vae, clean)), rows)
    assert scores["ocr"] > 0.95
    assert scores["geneval_strict"] > 0.95
