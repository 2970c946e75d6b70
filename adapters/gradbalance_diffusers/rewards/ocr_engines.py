"""Engines that read the text on pictures: RapidOCR, and PaddleOCR from version 3."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradbalance.errors import MissingDependencyError

SMALL = 96
"""RapidOCR reads pictures up to this many pixels on the longer side as one line of text, without detection."""
BATCH = 16
"""Small pictures that RapidOCR's recognizer reads at once."""
_LINE_HEIGHT = 48  # input height of RapidOCR's recognizer


class Engine(Protocol):
    """Reads pictures; called by one thread at a time."""

    def read(self, pictures: NDArray[np.uint8]) -> list[str]:
        """The text on every one of the RGB pictures ``[B, H, W, 3]``, an empty string where there is none."""
        ...


class RapidEngine:
    """RapidOCR on the CPU by onnxruntime; its wheel holds the models.

    A picture of at most `SMALL` pixels is scaled (bicubic) to the recognizer's input height and read as a single line
    of text; a larger one goes through text detection first, and its lines are joined.

    Args:
        threads: Threads of each onnxruntime session.

    Raises:
        MissingDependencyError: rapidocr or onnxruntime is not installed.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._sessions: dict[bool, Any] = {}
        _rapidocr()

    def read(self, pictures: NDArray[np.uint8]) -> list[str]:
        """As `Engine` says."""
        small = max(pictures.shape[1:3]) <= SMALL
        return self._read_lines(pictures) if small else [self._read_page(picture) for picture in pictures]

    def _read_lines(self, pictures: NDArray[np.uint8]) -> list[str]:
        height, width = pictures.shape[1:3]
        size = (max(_LINE_HEIGHT, round(_LINE_HEIGHT * width / height)), _LINE_HEIGHT)
        lines = [
            _bgr(np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))) for picture in pictures
        ]
        result = self._session(small=True).recognize_txt(lines)
        return [text or "" for text in result.txts or [""] * len(lines)]

    def _read_page(self, picture: NDArray[np.uint8]) -> str:
        result = self._session(small=False)(_bgr(picture), use_cls=False)
        return "".join(result.txts or ())

    def _session(self, small: bool) -> Any:
        if small not in self._sessions:
            # Without the narrow rec_img_shape the recognizer would pad every small picture to 320 pixels, at 6 times
            # the cost.
            narrow = {"Rec.rec_img_shape": [3, _LINE_HEIGHT, _LINE_HEIGHT], "Rec.rec_batch_num": BATCH} if small else {}
            self._sessions[small] = _rapidocr().RapidOCR(
                params={
                    "EngineConfig.onnxruntime.intra_op_num_threads": self._threads,
                    "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                    "Global.log_level": "critical",
                    **narrow,
                }
            )
        return self._sessions[small]


class PaddleEngine:
    """PaddleOCR, English, without the steps that turn and flatten photographed pages.

    Every picture goes through text detection; the lines that the recognizer has some confidence in are joined.

    Args:
        threads: Threads of the CPU engine.
        device: Paddle's name of the device, such as ``"cpu"`` or ``"gpu:0"``.

    Raises:
        MissingDependencyError: paddleocr or paddlepaddle is not installed, or of a version with another interface.
    """

    def __init__(self, threads: int, device: str) -> None:
        try:
            import paddleocr
        except ImportError as error:
            raise _paddle_error(f"Found no paddleocr ({error})") from error
        self._version = getattr(paddleocr, "__version__", "of unknown version")
        # Version 2 has `ocr` only, and takes other arguments here.
        if not hasattr(paddleocr.PaddleOCR, "predict"):
            raise _paddle_error(f"Found paddleocr {self._version}")
        try:
            self._reader = paddleocr.PaddleOCR(
                lang="en",
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                device=device,
                cpu_threads=threads,
            )
        except ImportError as error:
            raise _paddle_error(f"Found paddleocr {self._version}, which lacks a package ({error})") from error

    def read(self, pictures: NDArray[np.uint8]) -> list[str]:
        """As `Engine` says."""
        results = list(self._reader.predict([_bgr(picture) for picture in pictures]))
        try:
            lines = [list(zip(result["rec_texts"], result["rec_scores"], strict=True)) for result in results]
        except (KeyError, TypeError) as error:
            raise _paddle_error(f"Found paddleocr {self._version}, whose results hold no rec_texts") from error
        return ["".join(text for text, score in page if score > 0) for page in lines]


def _bgr(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(picture[:, :, ::-1])


def _rapidocr() -> Any:
    try:
        import onnxruntime  # noqa: F401  rapidocr's engine, which it imports only on use
        import rapidocr
    except ImportError as error:
        raise MissingDependencyError(
            'OCR needs rapidocr and onnxruntime, which are not installed; run `pip install "gradbalance[diffusers]"`.'
        ) from error
    return rapidocr


def _paddle_error(found: str) -> MissingDependencyError:
    return MissingDependencyError(
        'OCR(backend="paddle") needs paddleocr >= 3 (its interface was checked in 3.7) and paddlepaddle. '
        f'{found}. Run `pip install "paddleocr>=3" paddlepaddle`, or leave `backend` at "rapidocr".'
    )
