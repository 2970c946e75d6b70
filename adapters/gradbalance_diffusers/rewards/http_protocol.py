"""What a reward and its server say to each other, in JSON.

``GET /health`` is answered with ``{"name": "ocr", "protocol": 1, "version": "0.1.0"}``.

``POST /score`` of ``{"images": [...], "prompts": [...], "metadata": {"source": [...]}}``, with B pictures (PNG in
base64, all of one size), B texts and lists of length B, is answered with ``{"scores": [...]}``: B numbers, null where
the reward does not apply to a sample. ``"errors"``, a list of B texts or nulls, may name samples whose score was lost.

A failure is a status other than 200 with ``{"error": "what is wrong"}``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from .scores import LostScore

PROTOCOL = 1
HEALTH, SCORE = "/health", "/score"


def read_health(reply: Any) -> str:
    """The name of the reward that a server says it has.

    Raises:
        ValueError: A reply of another form or protocol.

    >>> read_health({"name": "ocr", "protocol": 1})
    'ocr'
    """
    name, protocol = (reply.get("name"), reply.get("protocol")) if isinstance(reply, dict) else (None, None)
    if not isinstance(name, str) or protocol != PROTOCOL:
        raise ValueError(f"no {{'name': text, 'protocol': {PROTOCOL}}}")
    return name


def read_scores(reply: Any, size: int) -> list[float | None]:
    """Scores of ``size`` samples: a number, None where the reward does not apply, a LostScore where it failed.

    Raises:
        ValueError: A reply of another form.

    >>> read_scores({"scores": [0.5, None, None], "errors": [None, None, "no answer"]}, 3)
    [0.5, None, nan]
    """
    scores = _listed(reply, "scores", size)
    errors = _listed(reply, "errors", size) if reply.get("errors") is not None else [None] * size
    return [_score(score, error, i) for i, (score, error) in enumerate(zip(scores, errors, strict=True))]


def write_scores(scores: Sequence[float], lost: dict[int, str]) -> dict[str, Any]:
    """The reply for scores that are NaN where there is none, and reasons of the lost ones by sample.

    >>> write_scores([0.5, math.nan, math.nan], {2: "no answer"})
    {'scores': [0.5, None, None], 'errors': [None, None, 'no answer']}
    """
    reply: dict[str, Any] = {"scores": [None if math.isnan(score) else score for score in scores]}
    if lost:
        reply["errors"] = [lost.get(i) for i in range(len(scores))]
    return reply


def _listed(reply: Any, key: str, size: int) -> list[Any]:
    found = reply.get(key) if isinstance(reply, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"no list {key!r}")
    if len(found) != size:
        raise ValueError(f"{len(found)} {key} for {size} samples")
    return found


def _score(score: Any, error: Any, sample: int) -> float | None:
    if error is not None:
        return LostScore(str(error))
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
        raise ValueError(f"{score!r} for sample {sample}, which is neither a finite number nor null")
    return float(score)
