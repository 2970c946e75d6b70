import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from gradbalance.errors import InvalidArgumentError, MissingDependencyError
from gradbalance_diffusers.rewards import RewardSet
from gradbalance_diffusers.rewards.ocr import OCR, levenshtein, text_similarity


def picture(text: str, size: int = 32, font: int = 16) -> torch.Tensor:
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    draw.text((size / 2, size / 2), text, fill=(200, 30, 40), font=ImageFont.load_default(size=font), anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def ocr() -> OCR:
    return OCR()


def test_right_wrong_and_missing_text(ocr):
    images = torch.stack([picture("427"), picture("421"), picture(""), picture("93")])
    prompts = ['a sign that says "427"'] * 3 + ['a sign that says "39"']
    assert ocr(images, prompts) == pytest.approx([1, 2 / 3, 0, 0])


def test_contained_text_is_right(ocr):
    assert ocr(picture("427")[None], ['a sign that says "42"']) == [1.0]


@pytest.mark.parametrize("prompt", ["no quotes", 'an empty "" quote', 'spaces "  "', 'an open "quote'])
def test_nothing_quoted_is_not_applicable(ocr, prompt):
    assert ocr(picture("427")[None], [prompt]) == [None]


def test_other_sources_are_not_applicable(ocr):
    images = picture("427").expand(3, -1, -1, -1)
    assert ocr(images, ['"427"'] * 3, source=["ocr", "general", None]) == [1.0, None, 1.0]


@pytest.mark.parametrize(("size", "font"), [(24, 12), (33, 16), (48, 24), (96, 40)])
def test_small_sizes(ocr, size, font):
    assert ocr(picture("42", size, font)[None], ['"42"']) == [1.0]


def test_small_pictures_that_are_not_square(ocr):
    wide = torch.ones(3, 32, 64)
    wide[:, :, 16:48] = picture("427")
    assert ocr(torch.stack([wide]), ['"427"']) == [1.0]


def test_large_picture_with_text_in_two_places(ocr):
    image = Image.new("RGB", (256, 256), "white")
    draw = ImageDraw.Draw(image)
    draw.text((20, 30), "Hello", fill="black", font=ImageFont.load_default(size=40))
    draw.text((90, 180), "427", fill="navy", font=ImageFont.load_default(size=40))
    large = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    assert ocr(torch.stack([large, torch.ones_like(large)]), ['"427"', '"427"']) == [1.0, 0.0]


def test_more_pictures_than_a_batch_keep_their_order(ocr):
    texts = [f"{n:02d}" for n in range(10, 50)]
    assert ocr(torch.stack([picture(text) for text in texts]), [f'"{text}"' for text in texts]) == [1.0] * len(texts)


def test_failing_engine_raises(ocr, monkeypatch):
    def fail(lines):
        raise RuntimeError("engine broke")

    ocr.read(picture("1")[None])
    monkeypatch.setattr(ocr._engine._session(small=True), "recognize_txt", fail)
    with pytest.raises(RuntimeError, match="engine broke"):
        ocr(picture("427")[None], ['"427"'])


def test_a_quotation_in_a_general_prompt_stays_out_of_the_statistics(ocr):
    """The published code scores any prompt with quotes, so that general prompts move the mean of the OCR reward."""
    rows = [{"source": "ocr"}, {"source": "general"}, {"source": "geneval", "include": []}, {"source": "ocr"}]
    prompts = ['a sign that says "427"', 'a man who shouts "hello"', 'one "red" car', "a sign without a quotation"]
    table = RewardSet([ocr])(picture("427").expand(4, -1, -1, -1), prompts, rows)
    assert table.mask.tolist() == [[True], [False], [False], [False]]
    assert table.means() == {"ocr": 1.0}
    assert table.counts() == {"ocr": 1}


def test_backends_and_devices_that_do_not_fit():
    with pytest.raises(InvalidArgumentError, match="Found backend='tesseract'"):
        OCR(backend="tesseract")
    with pytest.raises(InvalidArgumentError, match=r"'rapidocr', which runs on the CPU.*device='cuda'"):
        OCR(device="cuda")


def test_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "gradbalance\[diffusers\]"'):
        OCR()


def reference_distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        reference_distance(a[1:], b) + 1,
        reference_distance(a, b[1:]) + 1,
        reference_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


@given(st.text("123", max_size=5), st.text("123", max_size=5))
def test_levenshtein_equals_its_recursive_definition(a, b):
    assert levenshtein(a, b) == reference_distance(a, b)


@given(st.text("0123456789abc", min_size=1, max_size=6), st.text("0123456789aBc ", max_size=8))
def test_similarity_stays_in_the_unit_interval(target, recognized):
    assert 0 <= text_similarity(target, recognized) <= 1
