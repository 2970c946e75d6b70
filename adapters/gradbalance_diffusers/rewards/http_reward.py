"""Any reward behind an HTTP endpoint."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, get_args

from torch import Tensor

from gradbalance.errors import InvalidArgumentError

from .base import OnError
from .http_client import JSONEndpoint, RemoteError
from .http_png import encode_png
from .http_protocol import HEALTH, SCORE, read_health, read_scores
from .scores import LostScore

_HEALTH_SECONDS = 30.0


class HTTPReward:
    """A reward that a server computes, such as ``python -m gradbalance_diffusers.rewards.serve``.

    For scorers that need another environment, another machine or another GPU. Pictures are sent as 8-bit PNG; prompts
    and metadata go with them, so the server decides to which samples its reward applies. docs/remote-rewards.md
    describes what is sent and what is expected back.

    Args:
        url: Address of the server, such as ``http://127.0.0.1:8000``.
        batch_size: Pictures per request.
        connect_timeout: Seconds to connect.
        timeout: Seconds from being connected to the last byte of the reply.
        retries: Further attempts after connection errors, timeouts, statuses 5xx, 408 and 429, and replies that are no
            JSON.
        backoff: Seconds before the first of them, doubled for each one after it.
        deadline: Seconds for a whole batch of samples, with all its requests and their repetitions.
        on_error: What a request does that fails for good. ``"raise"``: the call raises :class:`RemoteError`, at once.
            ``"mask"``: its samples become :class:`LostScore`, which a :class:`RewardSet` masks and counts, and the
            other requests go on.
        api_key_env: Environment variable with a key to send as ``Authorization: Bearer``.
        serves: Name that the server must give its reward in /health, if two servers are not to be confused.
        check: Ask /health now, so that a wrong address stops the program before a run begins.

    Raises:
        RemoteError: The server does not answer /health as it should.
        InvalidArgumentError: A value out of range, or the server has another reward than ``serves``.
    """

    name = "http"

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 16,
        connect_timeout: float = 5.0,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.5,
        deadline: float = 600.0,
        on_error: OnError = "raise",
        api_key_env: str | None = None,
        serves: str | None = None,
        check: bool = True,
    ) -> None:
        if batch_size < 1 or not deadline > 0 or on_error not in get_args(OnError):
            raise InvalidArgumentError(
                "`batch_size` must be at least 1, `deadline` positive and `on_error` 'raise' or 'mask'. Found "
                f"batch_size={batch_size}, deadline={deadline}, on_error={on_error!r}."
            )
        self._endpoint = JSONEndpoint(
            url,
            connect_timeout=connect_timeout,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            api_key_env=api_key_env,
        )
        self._batch_size, self._deadline, self._on_error = batch_size, deadline, on_error
        if check:
            self.check(serves)

    def check(self, serves: str | None = None) -> str:
        """Ask the server for the name of its reward.

        Raises:
            RemoteError: No answer, or another one than agreed.
            InvalidArgumentError: Another reward than ``serves``.
        """
        try:
            found = self._endpoint.get(HEALTH, read_health, time.monotonic() + min(self._deadline, _HEALTH_SECONDS))
        except RemoteError as error:
            raise RemoteError(
                f"{error} Start the server first (`python -m gradbalance_diffusers.rewards.serve REWARD --port PORT`) "
                "and check the address, or pass check=False to find out later."
            ) from error
        if serves not in (None, found):
            raise InvalidArgumentError(
                f"`url` must be the address of a server of {serves!r}. Found {self._endpoint.url}, which serves "
                f"{found!r}."
            )
        return found

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float | None]:
        """Score pictures, float ``[B, 3, H, W]`` in [0, 1], in requests of ``batch_size``.

        Raises:
            RemoteError: A request failed for good, with ``on_error="raise"``.
            InvalidArgumentError: Metadata that JSON cannot express.
        """
        until = time.monotonic() + self._deadline
        scores: list[float | None] = []
        for start in range(0, len(prompts), self._batch_size):
            part = slice(start, min(start + self._batch_size, len(prompts)))
            columns = {key: column[part] for key, column in metadata.items()}
            try:
                scores += self._score(images[part], prompts[part], columns, until)
            except RemoteError as error:
                if self._on_error == "raise":
                    raise RemoteError(f"Samples {part.start} to {part.stop - 1}: {error}") from error
                scores += [LostScore(str(error))] * (part.stop - part.start)
        return scores

    def _score(
        self, images: Tensor, prompts: list[str], metadata: dict[str, list[Any]], until: float
    ) -> list[float | None]:
        payload = {"images": [encode_png(image) for image in images], "prompts": prompts, "metadata": metadata}
        try:
            return self._endpoint.post(SCORE, payload, partial(read_scores, size=len(prompts)), until)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"Metadata must be what JSON can express to be sent to {self._endpoint.url}. Found the keys "
                f"{list(metadata)}: {error}"
            ) from error
