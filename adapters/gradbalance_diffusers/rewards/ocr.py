"""OCR reward: does the picture show the quoted text?"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.images import to_uint8
from gradbalance_diffusers.rewards.ocr_engines import Engine, PaddleEngine, RapidEngine


class OCR:
    r"""Reward for legible text, in [0, 1]: one minus the relative edit distance.

    The target t is the text between the first two double quotes of the prompt. With the recognized text r, both
    lower-cased and without spaces,

    $$R = 1 - d / |t|, \quad d = 0 \text{ if } t \subseteq r, \text{ else } \min(\mathrm{lev}(t, r), |t|)$$

    where lev is the Levenshtein distance. This is the OCR reward of Flow-GRPO (Liu et al. 2025), there with PaddleOCR
    2.9 as the engine. Engines differ in what they read: compare runs that used the same one.

    A row gets None where its prompt quotes nothing, and where its metadata `source` is another than `ocr`, quotes or
    not: a quotation in a general prompt is no order for text. A picture without readable text gets 0. A failing engine
    raises.

    Args:
        threads: CPU threads of the engine.
        backend: ``"rapidocr"`` (see `RapidEngine`), or ``"paddle"`` for PaddleOCR from version 3 (see `PaddleEngine`).
        device: Paddle only: its name of the device, such as ``"gpu:0"``. None: the CPU.

    Raises:
        MissingDependencyError: A package of the backend is not installed, or too old.
        InvalidArgumentError: An unknown backend, or a device for RapidOCR.

    Example:
        >>> import numpy as np
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

    def __init__(
        self, threads: int = 1, *, backend: Literal["rapidocr", "paddle"] = "rapidocr", device: str | None = None
    ) -> None:
        if backend not in ("rapidocr", "paddle") or (backend == "rapidocr" and device not in (None, "cpu")):
            raise InvalidArgumentError(
                "`backend` must be 'rapidocr', which runs on the CPU, or 'paddle', which may take another `device`. "
                f"Found backend={backend!r}, device={device!r}."
            )
        self._engine: Engine = RapidEngine(threads) if backend == "rapidocr" else PaddleEngine(threads, device or "cpu")
        self._lock = threading.Lock()  # engines keep state

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
        with self._lock:
            return self._engine.read(to_uint8(images))


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
