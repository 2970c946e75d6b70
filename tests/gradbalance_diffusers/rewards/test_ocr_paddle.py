"""PaddleOCR as the engine, against stand-ins with the interfaces of its versions 2 and 3."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gradbalance.errors import MissingDependencyError
from gradbalance_diffusers.rewards.ocr import OCR

Page = dict[str, Any]


class PaddleOCR2:
    """Version 2.9: `ocr` only, nested lists, and its own arguments."""

    def __init__(self, **kwargs: Any) -> None:
        known = {"use_angle_cls", "lang", "use_gpu", "show_log"}
        if set(kwargs) - known:
            raise SystemExit(f"unrecognized arguments: {sorted(set(kwargs) - known)}")

    def ocr(self, img: Any, cls: bool = True) -> list[Any]:
        return [[[[[0, 0], [9, 0], [9, 9], [0, 9]], ("427", 0.99)]]]


class PaddleOCR3:
    """Version 3.7: `predict` with results that are mappings; arguments of version 2 are refused."""

    pages: tuple[Page, ...] = ()
    made: list[dict[str, Any]]
    seen: list[list[np.ndarray]]

    def __init__(
        self,
        use_doc_orientation_classify: bool | None = None,
        use_doc_unwarping: bool | None = None,
        use_textline_orientation: bool | None = None,
        lang: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs.keys() - {"device", "enable_hpi", "precision", "enable_mkldnn", "cpu_threads"}:
            raise ValueError(f"Unknown argument: {name}")
        photo = (use_doc_orientation_classify, use_doc_unwarping, use_textline_orientation)
        self.made.append({"photo": photo, "lang": lang, **kwargs})

    def predict(self, input: list[np.ndarray], *, text_rec_score_thresh: float | None = None) -> list[Page]:
        self.seen.append(input)
        return list(self.pages)

    def ocr(self, img: Any, **kwargs: Any) -> list[Page]:
        raise AssertionError("deprecated")


def install(monkeypatch: pytest.MonkeyPatch, version: str, reader: type) -> None:
    module = ModuleType("paddleocr")
    module.__version__ = version  # type: ignore[attr-defined]
    module.PaddleOCR = reader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paddleocr", module)


def page(*lines: tuple[str, float]) -> Page:
    return {"rec_texts": [text for text, _ in lines], "rec_scores": [score for _, score in lines], "rec_polys": []}


@pytest.fixture
def paddle(monkeypatch: pytest.MonkeyPatch) -> type[PaddleOCR3]:
    reader = type("PaddleOCR", (PaddleOCR3,), {"made": [], "seen": []})
    install(monkeypatch, "3.7.0", reader)
    return reader


def test_scores(paddle) -> None:
    paddle.pages = (page(("Open", 0.98), ("24 h", 0.9)), page(("0pen", 0.6)), page())
    scores = OCR(backend="paddle")(torch.ones(3, 3, 128, 128), ['"open 24"', '"open"', '"open"'])
    assert scores == pytest.approx([1, 3 / 4, 0])


def test_lines_without_confidence_are_left_out(paddle) -> None:
    paddle.pages = (page(("abc", 0.0), ("427", 0.5)),)
    assert OCR(backend="paddle").read(torch.ones(1, 3, 128, 128)) == ["427"]


def test_it_is_built_once_with_arguments_of_version_3(paddle) -> None:
    ocr = OCR(4, backend="paddle", device="gpu:1")
    paddle.pages = (page(("427", 0.9)),)
    for _ in range(2):
        ocr(torch.ones(1, 3, 128, 128), ['"427"'])
    assert paddle.made == [{"photo": (False, False, False), "lang": "en", "device": "gpu:1", "cpu_threads": 4}]
    OCR(backend="paddle")
    assert paddle.made[1]["device"] == "cpu"


def test_pictures_arrive_in_order_as_8_bit_bgr(paddle) -> None:
    images = torch.zeros(3, 3, 128, 100)
    images[0, 0], images[1, 1], images[2, 2] = 1.0, 0.5, 0.2
    paddle.pages = (page(), page(), page())
    OCR(backend="paddle")(images, ['"a"'] * 3)
    (seen,) = paddle.seen
    assert [array.shape for array in seen] == [(128, 100, 3)] * 3
    assert [array[5, 5].tolist() for array in seen] == [[0, 0, 255], [0, 128, 0], [51, 0, 0]]
    assert all(array.dtype == np.uint8 and array.flags.c_contiguous for array in seen)


def test_only_rows_that_ask_for_text_are_read(paddle) -> None:
    paddle.pages = (page(("427", 0.9)),)
    images = torch.ones(3, 3, 128, 128)
    assert OCR(backend="paddle")(images, ["a sign", '"427"', '"9"'], source=["ocr", "ocr", "general"]) == [
        None,
        1,
        None,
    ]
    assert [len(batch) for batch in paddle.seen] == [1]


def test_version_2_is_refused_before_it_is_built(monkeypatch) -> None:
    install(monkeypatch, "2.9.1", PaddleOCR2)
    with pytest.raises(MissingDependencyError, match=r"needs paddleocr >= 3 .*Found paddleocr 2\.9\.1.*pip install"):
        OCR(backend="paddle")


def test_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    with pytest.raises(MissingDependencyError, match=r'Found no paddleocr.*pip install "paddleocr>=3" paddlepaddle'):
        OCR(backend="paddle")


def test_without_the_framework_beneath(monkeypatch) -> None:
    class Incomplete(PaddleOCR3):
        def __init__(self, **kwargs: Any) -> None:
            raise ModuleNotFoundError("No module named 'paddle'")

    install(monkeypatch, "3.7.0", Incomplete)
    with pytest.raises(MissingDependencyError, match=r"3\.7\.0, which lacks a package \(No module named 'paddle'\)"):
        OCR(backend="paddle")


def test_results_of_another_form(paddle) -> None:
    paddle.pages = ({"texts": ["427"]},)
    with pytest.raises(MissingDependencyError, match=r"checked in 3\.7.*whose results hold no rec_texts"):
        OCR(backend="paddle").read(torch.ones(1, 3, 128, 128))


def test_a_failing_engine_raises(paddle, monkeypatch) -> None:
    def fail(self: object, input: object) -> None:
        raise RuntimeError("engine broke")

    monkeypatch.setattr(paddle, "predict", fail)
    with pytest.raises(RuntimeError, match="engine broke"):
        OCR(backend="paddle")(torch.ones(1, 3, 128, 128), ['"a"'])
