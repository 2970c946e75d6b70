import random

import numpy as np
import pytest
import torch

from gradbalance_diffusers.rewards.appearance import Background
from gradbalance_diffusers.rewards.geometry import GenEvalGeometry
from gradbalance_diffusers.rewards.ocr import OCR
from gradbalance_diffusers.tiny.data import draw_pool, wrong_caption
from gradbalance_diffusers.tiny.prompts import SOURCES, tiny_prompts
from gradbalance_diffusers.tiny.scene import draw_scene

ROWS = {source: tiny_prompts("test", source, 11) for source in SOURCES}


def draw(rows: list[dict], seed: int) -> torch.Tensor:
    rng = random.Random(seed)
    return torch.stack([torch.from_numpy(np.array(draw_scene(row, rng))).permute(2, 0, 1) / 255 for row in rows])


@pytest.mark.parametrize("source", SOURCES)
def test_pictures_are_fixed_by_the_seed(source):
    assert torch.equal(draw(ROWS[source], 1), draw(ROWS[source], 1))
    assert not torch.equal(draw(ROWS[source], 1), draw(ROWS[source], 2))


def test_clean_pictures_are_right_in_the_eyes_of_the_rewards():
    for source, reward in (("ocr", OCR()), ("geneval", GenEvalGeometry(strict=True))):
        rows = tiny_prompts("test", source, 64)
        scores = reward(draw(rows, 0), [row["prompt"] for row in rows], include=[row.get("include") for row in rows])
        assert np.mean(scores) > 0.98


def test_background_is_drawn_within_the_shade():
    rows = [row for source in SOURCES for row in ROWS[source]]
    scores = Background()(draw(rows, 0), [""] * len(rows), background=[row["background"] for row in rows])
    assert min(scores) > 0.6


def test_pool_is_fixed_by_the_seed_and_keeps_the_test_split_out():
    rows, pictures = draw_pool(200, seed=5)
    again, same = draw_pool(200, seed=5)
    assert rows == again
    assert torch.equal(pictures, same)
    test = {row["prompt"] for source in SOURCES for row in tiny_prompts("test", source)}
    assert not test & {row["prompt"] for row in rows}


def test_wrong_captions_are_prompts_that_differ():
    rng = random.Random(0)
    rows, _ = draw_pool(300, seed=1)
    for row in rows:
        caption = wrong_caption(row, rng)
        assert caption != row["prompt"]
        same_words = sum(a == b for a, b in zip(caption.split(), row["prompt"].split(), strict=True))
        assert same_words >= len(row["prompt"].split()) - 4
