"""OCR reward: does the picture show the quoted text?"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gradbalance.errors import MissingDependencyError

SMALL = 96
"""Pictures up to this many pixels on the longer side are read as one line of text, without detection."""
BATCH = 16
"""Small pictures the recognizer reads at once."""
_LINE_HEIGHT = 48  # input height of the recognizer


class OCR:
    r"""Reward for legible text, in [0, 1]: one minus the relative edit distance.

    The target t is the text between the first two double quotes of the prompt. With the recognized text r, both
    lower-cased and without spaces,

    $$R = 1 - d / |t|, \quad d = 0 \text{ if } t \subseteq r, \text{ else } \min(\mathrm{lev}(t, r), |t|)$$

    where lev is the Levenshtein distance. This is the OCR reward of Flow-GRPO (Liu et al. 2025) with RapidOCR as the
    engine. A picture of at most `SMALL` pixels is scaled (bicubic) to the recognizer's input height and read as a
    single line of text; a larger one goes through text detection first, and its lines are joined.

    A row whose prompt quotes nothing, or whose metadata `source` is given and is not `ocr`, gets None. A picture
    without readable text gets 0. A failing engine raises.

    Args:
        threads: Threads of each onnxruntime session.

    Raises:
        MissingDependencyError: rapidocr or onnxruntime is not installed.

    Example:
        >>> import torch
        >>> from PIL import Image, ImageDraw, ImageFont
        >>> picture = Image.new("RGB", (32, 32), "white")
        >>> ImageDraw.Draw(picture).text((3, 8), "427", fill="red", font=ImageFont.load_default(size=16))
        >>> images = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255
        >>> OCR()(images, ['a sign that says "427"'])
        [1.0]
        >>> OCR()(images, ["a sign"])
        [None]
    """

    name = "ocr"

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._lock = threading.Lock()  # RapidOCR keeps state in the engine object
        self._engines: dict[bool, Any] = {}
        _rapidocr()

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], by the text their prompts quote."""
        sources = metadata.get("source") or [None] * len(prompts)
        targets = [
            quoted_text(prompt) if source in (None, "ocr") else None
            for prompt, source in zip(prompts, sources, strict=True)
        ]
        asked = [i for i, target in enumerate(targets) if target]
        scores: list[float | None] = [None] * len(prompts)
        for i, text in zip(asked, self.read(images[asked]) if asked else (), strict=True):
            scores[i] = text_similarity(targets[i] or "", text)
        return scores

    def read(self, images: Tensor) -> list[str]:
        """Returns the text on every picture, an empty string where there is none."""
        arrays = (images.detach().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        small = max(arrays.shape[1:3]) <= SMALL
        with self._lock:
            return self._read_lines(arrays) if small else [self._read_page(array) for array in arrays]

    def _read_lines(self, arrays: NDArray[np.uint8]) -> list[str]:
        height, width = arrays.shape[1:3]
        size = (max(_LINE_HEIGHT, round(_LINE_HEIGHT * width / height)), _LINE_HEIGHT)
        lines = [
            np.ascontiguousarray(np.asarray(Image.fromarray(array).resize(size, Image.Resampling.BICUBIC))[:, :, ::-1])
            for array in arrays
        ]
        result = self._engine(small=True).recognize_txt(lines)
        return [text or "" for text in result.txts or [""] * len(lines)]

    def _read_page(self, array: NDArray[np.uint8]) -> str:
        result = self._engine(small=False)(np.ascontiguousarray(array[:, :, ::-1]), use_cls=False)
        return "".join(result.txts or ())

    def _engine(self, small: bool) -> Any:
        if small not in self._engines:
            # Without the narrow rec_img_shape the recognizer would pad every small picture to 320 pixels, at 6 times
            # the cost.
            narrow = {"Rec.rec_img_shape": [3, _LINE_HEIGHT, _LINE_HEIGHT], "Rec.rec_batch_num": BATCH} if small else {}
            self._engines[small] = _rapidocr().RapidOCR(
                params={
                    "EngineConfig.onnxruntime.intra_op_num_threads": self._threads,
                    "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                    "Global.log_level": "critical",
                    **narrow,
                }
            )
        return self._engines[small]


def quoted_text(prompt: str) -> str | None:
    """Returns the text between the first two double quotes in the form that is compared, None if there is none.

    Example:
        >>> quoted_text('a sign that says "Open 24"'), quoted_text("no quotes"), quoted_text('empty ""')
        ('open24', None, None)
    """
    parts = prompt.split('"', 2)
    return (_comparable(parts[1]) or None) if len(parts) == 3 else None


def text_similarity(target: str, recognized: str) -> float:
    """Returns one minus the relative edit distance, 1 where the target is contained in the recognized text.

    Example:
        >>> text_similarity("427", "no 427"), text_similarity("42", "47"), text_similarity("42", "")
        (1.0, 0.5, 0.0)
    """
    recognized = _comparable(recognized)
    if target in recognized:
        return 1.0
    return 1 - min(levenshtein(target, recognized), len(target)) / len(target)


def levenshtein(a: str, b: str) -> int:
    """Returns the least number of insertions, deletions and substitutions that turn one text into the other.

    Example:
        >>> levenshtein("kitten", "sitting")
        3
    """
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


def _comparable(text: str) -> str:
    return text.lower().replace(" ", "")


def _rapidocr() -> Any:
    try:
        import onnxruntime  # noqa: F401  rapidocr's engine, which it imports only on use
        import rapidocr
    except ImportError as error:
        raise MissingDependencyError(
            'OCR needs rapidocr and onnxruntime, which are not installed; run `pip install "gradbalance[diffusers]"`.'
        ) from error
    return rapidocr
