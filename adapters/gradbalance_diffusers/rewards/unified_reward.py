"""UnifiedReward: a vision-language model behind an OpenAI-compatible server marks pictures from 1 to 5."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from functools import partial
from typing import Any, get_args

from torch import Tensor

from gradbalance.errors import InvalidArgumentError

from .base import OnError
from .http_client import JSONEndpoint, RemoteError
from .http_png import encode_png
from .scores import LostScore
from .workers import SerialWorker

TEMPLATE = """Below are a caption and a picture that was generated from it. Judge two things together: whether the \
picture shows everything that the caption asks for (objects, their number, colors, positions, style and any written \
text), and whether it is well made (sharp, coherent, free of distortions). Explain your judgement in a few sentences. \
Then give one mark between 1 (nothing fits) and 5 (nothing is missing), decimals allowed, in a last line of this form:
Final Score: <mark>

Caption: {prompt}"""
"""The question by default; its wording is our own."""
SIZE = 512
"""Height and width of the picture that the model is shown."""
_MARK = re.compile(r"Final Score:[\s*]*(\d+(?:\.\d+)?)", re.IGNORECASE)
_CHECK_SECONDS = 30.0
_EXCERPT = 200  # characters of an answer that a message quotes


class UnifiedReward:
    r"""Reward of a multimodal judge: $R = m / 5$ with its mark m from 1 to 5.

    The model (Wang et al. 2025, arXiv 2503.05236) runs in a server of its own, such as vLLM or SGLang, with the
    OpenAI-compatible chat interface. It is asked about one picture at a time, scaled to 512x512 pixels and sent as PNG,
    at temperature 0; the mark is read from ``Final Score: m`` in its answer, the last one if there are several. An
    answer without a mark from 1 to 5 is a :class:`LostScore`: masked and counted, never a 0.

    The model was trained with certain wordings of the question; numbers comparable to published ones need the wording
    they were made with, as ``template``.

    Args:
        url: Base address, with the ``/v1``.
        model: Name under which the server offers the model.
        template: The question; ``{prompt}`` in it stands for the prompt.
        parallel: Requests under way at a time. Such servers work on several at once.
        max_tokens: Longest answer.
        connect_timeout: Seconds to connect.
        timeout: Seconds for one answer.
        retries: Further attempts after connection errors, timeouts, statuses 5xx, 408 and 429.
        backoff: Seconds before the first of them, doubled for each one after it.
        deadline: Seconds for a whole batch of samples.
        on_error: What a request does that fails for good: ``"raise"`` a :class:`RemoteError`, or ``"mask"`` its sample
            as a LostScore.
        api_key_env: Environment variable with the key, if the server wants one. A key is not taken in any other way,
            so that none gets into a configuration file.
        check: Ask the server for its models now, so that a wrong address or name stops the program before a run begins.

    Raises:
        RemoteError: The server does not answer.
        InvalidArgumentError: A value out of range, or the server does not offer ``model``.
    """

    name = "unifiedreward"

    def __init__(
        self,
        url: str = "http://127.0.0.1:17140/v1",
        *,
        model: str = "UnifiedReward-7b-v1.5",
        template: str = TEMPLATE,
        parallel: int = 8,
        max_tokens: int = 512,
        connect_timeout: float = 5.0,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 0.5,
        deadline: float = 600.0,
        on_error: OnError = "raise",
        api_key_env: str | None = None,
        check: bool = True,
    ) -> None:
        if "{prompt}" not in template:
            raise InvalidArgumentError(
                f"`template` must contain {{prompt}}, where the prompt goes. Found {template!r}."
            )
        if parallel < 1 or max_tokens < 1 or not deadline > 0 or on_error not in get_args(OnError):
            raise InvalidArgumentError(
                "`parallel`, `max_tokens` and `deadline` must be positive and `on_error` 'raise' or 'mask'. Found "
                f"parallel={parallel}, max_tokens={max_tokens}, deadline={deadline}, on_error={on_error!r}."
            )
        self._endpoint = JSONEndpoint(
            url,
            connect_timeout=connect_timeout,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            api_key_env=api_key_env,
        )
        self._model, self._template, self._max_tokens = model, template, max_tokens
        self._deadline, self._on_error = deadline, on_error
        self._workers = [SerialWorker() for _ in range(parallel)]
        if check:
            self._check()

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float | None]:
        """Score pictures, float ``[B, 3, H, W]`` in [0, 1]; metadata is not looked at.

        Raises:
            RemoteError: A request failed for good, with ``on_error="raise"``.
        """
        batch = _Batch(time.monotonic() + self._deadline)
        futures: list[Future[float]] = [
            self._workers[i % len(self._workers)].submit(partial(self._score, image, prompt, batch))
            for i, (image, prompt) in enumerate(zip(images, prompts, strict=True))
        ]
        scores: list[float | None] = []
        for i, future in enumerate(futures):
            try:
                scores.append(future.result())
            except RemoteError as error:
                if self._on_error == "raise":
                    batch.until = 0.0  # those that have not begun fail at once
                    raise RemoteError(f"Sample {i} with the prompt {prompts[i]!r}: {error}") from error
                scores.append(LostScore(str(error)))
        return scores

    def _score(self, image: Tensor, prompt: str, batch: _Batch) -> float:
        picture = {"url": f"data:image/png;base64,{encode_png(image, (SIZE, SIZE))}"}
        content = [
            {"type": "image_url", "image_url": picture},
            {"type": "text", "text": self._template.replace("{prompt}", prompt)},
        ]
        request = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }
        return read_mark(self._endpoint.post("/chat/completions", request, _answer, batch.until))

    def _check(self) -> None:
        try:
            offered = self._endpoint.get("/models", _models, time.monotonic() + min(self._deadline, _CHECK_SECONDS))
        except RemoteError as error:
            raise RemoteError(
                f"{error} Start an OpenAI-compatible server of the model first and check the address (it ends in /v1), "
                "or pass check=False to find out later."
            ) from error
        if self._model not in offered:
            raise InvalidArgumentError(
                f"`model` must be one that {self._endpoint.url} offers, {offered}. Found {self._model!r}."
            )


class _Batch:
    """When the requests of one call must have ended."""

    def __init__(self, until: float) -> None:
        self.until = until


def read_mark(answer: str) -> float:
    """A fifth of the mark in an answer; a LostScore where there is none from 1 to 5.

    >>> read_mark("Sharp, but a cat is missing. Final Score: 3.5"), read_mark("It is good.").reason
    (0.7, "the answer has no 'Final Score:' from 1 to 5, it ends with 'It is good.'")
    """
    marks = _MARK.findall(answer)
    if not marks or not 1 <= float(marks[-1]) <= 5:
        return LostScore(f"the answer has no 'Final Score:' from 1 to 5, it ends with {answer[-_EXCERPT:]!r}")
    return float(marks[-1]) / 5


def _answer(reply: Any) -> str:
    """The text of a chat completion."""
    try:
        text = reply["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError("no text in choices[0].message.content")
    return text


def _models(reply: Any) -> list[str]:
    """Names of the models that a server offers."""
    try:
        return [str(model["id"]) for model in reply["data"]]
    except (LookupError, TypeError):
        raise ValueError("no list of models") from None
