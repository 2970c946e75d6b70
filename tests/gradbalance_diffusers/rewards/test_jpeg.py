import io

import pytest
import torch
from PIL import Image

from gradbalance_diffusers.rewards.jpeg import JPEGCompressibility


def test_is_minus_the_kilobytes_of_the_file():
    noise = torch.randint(0, 256, (3, 40, 56), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.permute(1, 2, 0).numpy()).save(file, format="JPEG", quality=95)
    assert JPEGCompressibility()(noise[None] / 255, [""]) == pytest.approx([-len(file.getvalue()) / 1000])


def test_smooth_pictures_score_higher_than_noise():
    generator = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, 64).expand(3, 64, 64)
    smooth, noisy = JPEGCompressibility()(torch.stack([ramp, torch.rand(3, 64, 64, generator=generator)]), ["", ""])
    assert smooth > noisy
