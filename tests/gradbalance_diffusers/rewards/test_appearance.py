import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.appearance import Background, Contrast, Saturation
from gradbalance_diffusers.rewards.segmentation import segment


def square(color: tuple[float, float, float], background: tuple[float, float, float], side: int = 12) -> torch.Tensor:
    image = torch.tensor(background, dtype=torch.float32).view(3, 1, 1).repeat(1, 32, 32)
    image[:, 10 : 10 + side, 10 : 10 + side] = torch.tensor(color).view(3, 1, 1)
    return image[None]


def test_saturation_is_that_of_the_object_whatever_its_area():
    small, large = square((0.8, 0.2, 0.2), (1, 1, 1), 5), square((0.8, 0.2, 0.2), (1, 1, 1), 20)
    assert Saturation()(small, [""]) == pytest.approx([0.75], abs=1e-6)
    assert Saturation()(large, [""]) == pytest.approx([0.75], abs=1e-6)


def test_contrast_is_the_distance_to_the_background_and_saturates_at_one():
    assert Contrast()(square((0.7, 0.8, 1.0), (1, 1, 1)), [""]) == pytest.approx([0.13**0.5], abs=1e-6)
    assert Contrast()(square((0, 0, 0), (1, 1, 1)), [""]) == [1.0]


def test_background_ignores_the_objects():
    image = square((1, 0, 0), (0.5, 0.5, 0.5))
    expected = 1 - (192 / 255 - 0.5) / 0.5
    assert Background()(image, [""], background=["gray"]) == pytest.approx([expected], abs=1e-6)
    assert Background()(image, [""], background=["black"])[0] < 0.1


def test_empty_picture():
    image = torch.ones(1, 3, 32, 32)
    assert Saturation()(image, [""]) == [0.0]
    assert Contrast()(image, [""]) == [0.0]
    assert Background()(image, [""], background=["white"])[0] > 0.95


def test_background_without_a_request_is_not_applicable():
    images = torch.ones(2, 3, 32, 32)
    assert Background()(images, ["", ""]) == [None, None]
    assert Background()(images, ["", ""], background=[None, "white"])[0] is None


def test_unknown_background_is_refused():
    with pytest.raises(InvalidArgumentError, match="background must be one of white, gray, black, found 'plaid'"):
        Background()(torch.ones(1, 3, 32, 32), [""], background=["plaid"])


@given(st.integers(0, 2**31), st.sampled_from(["white", "gray", "black"]), st.integers(8, 40))
def test_scores_stay_in_the_unit_interval_on_noise(seed, background, size):
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(seed))
    for scores in (
        Saturation()(images, ["", ""]),
        Contrast()(images, ["", ""]),
        Background()(images, ["", ""], background=[background] * 2),
    ):
        assert all(score is not None and 0 <= score <= 1 for score in scores)


def test_small_specks_are_not_drawn_objects():
    image = torch.ones(32, 32, 3).double().numpy()
    image[4:6, 4:6] = 0
    image[16:24, 16:24] = 0
    assert segment(image).count == 1
