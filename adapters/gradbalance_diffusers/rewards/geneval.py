"""GenEval: does a picture show the right objects, in number, color and position?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbalance.errors import InvalidArgumentError

from .geneval_color import ColorNamer, cut_out
from .geneval_detector import Mask2FormerDetector
from .geneval_request import Request, read_request
from .geneval_rules import Detection, Verdict, judge, needing_color, select
from .images import to_uint8
from .models import load_clip

Score = Literal["partial", "accuracy", "strict"]


class GenEval:
    """Objects, counts, colors and positions, checked by a detector (GenEval, Ghosh et al. 2023, arXiv 2310.11513).

    Mask2Former finds the objects and CLIP names their colors; :func:`~.geneval_rules.judge` holds the rules. The
    detector is the one of transformers in place of mmdetection's, see
    :class:`~.geneval_detector.Mask2FormerDetector`: compare the figures it gives with each other, not with published
    ones.

    A row is scored by its metadata ``include``, ``exclude`` and ``tag``, in the form of GenEval's files; one without
    ``include`` gets None.

    Args:
        detector: Folder or hub id of the Mask2Former model.
        clip: Folder or hub id of the CLIP model that names colors.
        score: ``"partial"``: partial credit in [0, 1], for training. ``"accuracy"``: 1 or 0 by GenEval's official rule,
            at least the objects asked for. ``"strict"``: 1 or 0, exactly the objects asked for.
        published_quirk: Partial credit as Flow-GRPO published it, see :func:`~.geneval_rules.judge`.
        detector_revision: Branch, tag or commit of the detector on the hub. None: its main branch.
        clip_revision: The same of the CLIP model.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, for both models.
        device: Such as ``"cuda:1"``, for both models. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures the detector sees at once.

    Raises:
        InvalidArgumentError: A model that cannot be loaded, options that do not fit; when called, metadata that breaks
            a rule.
    """

    name = "geneval"

    def __init__(
        self,
        detector: str | Path = "facebook/mask2former-swin-small-coco-instance",
        clip: str | Path = "openai/clip-vit-large-patch14",
        *,
        score: Score = "partial",
        published_quirk: bool = False,
        detector_revision: str | None = None,
        clip_revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 8,
    ) -> None:
        if score not in get_args(Score):
            raise InvalidArgumentError(f"`score` must be one of {', '.join(get_args(Score))}. Found {score!r}.")
        if published_quirk and score != "partial":
            raise InvalidArgumentError(
                f"`published_quirk` changes the partial credit only. Found it with score={score!r}. Leave it out."
            )
        self.score = score
        self.published_quirk = published_quirk
        self._detector = Mask2FormerDetector(
            detector, revision=detector_revision, dtype=dtype, device=device, batch_size=batch_size
        )
        self._name_colors = ColorNamer(
            load_clip(clip, revision=clip_revision, dtype=dtype, device=device, parameter="clip")
        )

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Sequence[Any]) -> list[float | None]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], by `include`, `exclude` and `tag`; prompts are not read."""
        verdicts = self.verdicts(images, **metadata)
        return [None if verdict is None else self._value(verdict) for verdict in verdicts]

    def verdicts(self, images: Tensor, **metadata: Sequence[Any]) -> list[Verdict | None]:
        """All scores of pictures and the reasons for them; None for a row without `include`.

        Args:
            images: Float ``[B, 3, H, W]`` in [0, 1].
            **metadata: ``include`` and possibly ``exclude`` and ``tag``, one list of length B each.
        """
        nothing = [None] * len(images)
        rows = zip(*(metadata.get(key) or nothing for key in ("include", "exclude", "tag")), strict=True)
        requests = {i: read_request(*row) for i, row in enumerate(rows) if row[0] is not None}
        verdicts: list[Verdict | None] = [None] * len(images)
        if requests:
            pictures = to_uint8(images[list(requests)])
            judged = self._judge(pictures, list(requests.values()))
            for i, verdict in zip(requests, judged, strict=True):
                verdicts[i] = verdict
        return verdicts

    def _judge(self, pictures: NDArray[np.uint8], requests: list[Request]) -> list[Verdict]:
        found: list[dict[str, list[Detection]]] = []
        cutouts, looked_at = [], []
        for picture, detections, request in zip(pictures, self._detector(pictures), requests, strict=True):
            found.append(select(detections, request.tag))
            for detection in needing_color(found[-1], request):
                cutouts.append(cut_out(picture, detection))
                looked_at.append(detection)
        colors = self._name_colors(cutouts, [detection.label for detection in looked_at])
        named = {id(detection): color for detection, color in zip(looked_at, colors, strict=True)}
        return [
            judge(_colored(objects, named), request, published_quirk=self.published_quirk)
            for objects, request in zip(found, requests, strict=True)
        ]

    def _value(self, verdict: Verdict) -> float:
        return {"partial": verdict.partial, "accuracy": float(verdict.accurate), "strict": float(verdict.strict)}[
            self.score
        ]


def _colored(found: dict[str, list[Detection]], colors: dict[int, str]) -> dict[str, list[Detection]]:
    return {
        label: [replace(detection, color=colors.get(id(detection))) for detection in objects]
        for label, objects in found.items()
    }
