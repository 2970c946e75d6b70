import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

from gradbalance_diffusers.rewards.images import MEAN, STD, cropped, normalized, padded, resized_with_pil, to_uint8

SHAPES = [(32, 32), (20, 28), (31, 17), (16, 16), (9, 13), (16, 37)]
ALL = [resized_with_pil, cropped, padded]


def random_pictures(*shape: int) -> torch.Tensor:
    return torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0))


def in_unit_range(pixels: torch.Tensor) -> torch.Tensor:
    return pixels * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


def resized_as_floats(images: torch.Tensor, size: tuple[int, int], method: Image.Resampling) -> torch.Tensor:
    """PIL's own filter on 32-bit floating point pixels; size is (height, width)."""
    channels = [
        torch.from_numpy(np.array(Image.fromarray(channel.numpy()).resize(size[::-1], method)))
        for channel in images.flatten(0, 1)
    ]
    return torch.stack(channels).unflatten(0, images.shape[:2])


@pytest.mark.parametrize("shape", SHAPES)
def test_clips_own_steps_equal_those_of_transformers(shape):
    images = random_pictures(*shape)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    pictures = [Image.fromarray(array) for array in to_uint8(images)]
    expected = processor(images=pictures, return_tensors="pt").pixel_values
    torch.testing.assert_close(resized_with_pil(images, 16), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(32, 32), (20, 20), (9, 9), (16, 16)])
def test_bilinear_filter_equals_that_of_pil(shape):
    images = random_pictures(*shape)
    expected = normalized(resized_as_floats(images, (16, 16), Image.Resampling.BILINEAR))
    torch.testing.assert_close(cropped(images, 16), expected, atol=1e-5, rtol=0)


def test_bilinear_filter_by_hand():
    row = torch.tensor([0.1, 0.9, 0.4, 0.6])
    images = row.expand(1, 3, 4, 4)
    a, b, c, d = row.tolist()  # at half size a triangle over 4 pixels: weights 3/4, 3/4, 1/4, cut off at the border
    expected = torch.tensor([(3 * a + 3 * b + c) / 7, (b + 3 * c + 3 * d) / 7]).expand(1, 3, 2, 2)
    torch.testing.assert_close(in_unit_range(cropped(images, 2)), expected)


@pytest.mark.parametrize(
    ("shape", "rows", "columns"), [((8, 19), (0, 8), (6, 14)), ((21, 8), (6, 14), (0, 8)), ((8, 11), (0, 8), (2, 10))]
)
def test_centre_crop(shape, rows, columns):
    """(19 - 8) / 2 = 5.5 and (11 - 8) / 2 = 1.5 are rounded to the even neighbour, as torchvision does."""
    images = random_pictures(*shape)
    expected = images[..., slice(*rows), slice(*columns)]
    torch.testing.assert_close(in_unit_range(cropped(images, 8)), expected)


def test_longer_side_is_rounded_down():
    resized = resized_as_floats(random_pictures(10, 19), (7, 13), Image.Resampling.BILINEAR)  # 7 * 19 / 10 = 13.3
    torch.testing.assert_close(
        in_unit_range(cropped(random_pictures(10, 19), 7)), resized[..., 3:10], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("shape", [(32, 32), (20, 28), (31, 17), (9, 13)])
def test_bicubic_filter_and_padding_equal_those_of_pil(shape):
    images = random_pictures(*shape)
    scale = 16 / max(shape)
    height, width = round(shape[0] * scale), round(shape[1] * scale)
    canvas = torch.zeros(2, 3, 16, 16)
    top, left = (16 - height) // 2, (16 - width) // 2
    canvas[..., top : top + height, left : left + width] = resized_as_floats(
        images, (height, width), Image.Resampling.BICUBIC
    )
    torch.testing.assert_close(padded(images, 16), normalized(canvas), atol=1e-5, rtol=0)


def test_padding_is_black_before_the_mean_is_taken_out():
    pixels = in_unit_range(padded(torch.ones(1, 3, 8, 4), 8))
    assert pixels[0, 0, 0].tolist() == pytest.approx([0, 0, 1, 1, 1, 1, 0, 0], abs=1e-6)


def test_a_thin_picture_keeps_a_line():
    assert padded(torch.ones(1, 3, 1, 400), 16).max() > 1


@pytest.mark.parametrize("prepare", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_gives_float32(prepare, dtype):
    images = torch.full((1, 3, 12, 12), 0.5, dtype=dtype)
    pixels = prepare(images, 8)
    assert pixels.dtype == torch.float32
    assert pixels.shape == (1, 3, 8, 8)
    torch.testing.assert_close(in_unit_range(pixels), torch.full_like(pixels, 0.5), atol=1 / 255, rtol=0)


@pytest.mark.parametrize("prepare", ALL)
def test_pictures_are_left_as_they_were(prepare):
    images = random_pictures(16, 16)
    before = images.clone()
    prepare(images, 16).add_(1)
    assert images.equal(before)


def test_eight_bit_levels_are_rounded_and_clamped():
    values = torch.tensor([-0.2, 0.49 / 255, 0.51 / 255, 100.4 / 255, 100.6 / 255, 1.3])
    levels = to_uint8(values.expand(1, 3, 1, 6))
    assert levels.dtype == np.uint8
    assert levels[0, 0, :, 1].tolist() == [0, 0, 1, 100, 101, 255]
