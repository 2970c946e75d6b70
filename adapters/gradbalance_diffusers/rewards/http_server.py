"""The server side of an HTTP reward."""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

import gradbalance
from gradbalance.errors import InvalidArgumentError

from .base import RESERVED
from .http_png import decode_pngs
from .http_protocol import HEALTH, PROTOCOL, SCORE, write_scores
from .scores import check_scores, lost_scores

_CHUNK = 2**16


class RefusalError(Exception):
    """A request that is answered with another status than 200.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Serves one reward; run it with ``serve_forever()``.

    Each request has a thread, and one at a time calls the reward. Requests are limited in size, their pictures are read
    as PNG only, and nothing in them is executed. There is no access control: on another address than 127.0.0.1, put it
    behind a firewall or a proxy.

    >>> from gradbalance_diffusers.rewards import HTTPReward
    >>> with RewardServer(lambda images, prompts: images.mean(dim=(1, 2, 3)), name="brightness") as server:
    ...     threading.Thread(target=server.serve_forever).start()
    ...     scores = HTTPReward(server.url, serves="brightness")(torch.ones(2, 3, 8, 8), ["a", "b"])
    ...     server.shutdown()
    >>> scores
    [1.0, 1.0]

    Args:
        reward: A callable in the form of a :class:`Reward`.
        name: What /health says. None: the reward's ``name``.
        address: Host and port; port 0 takes a free one.
        max_bytes: Largest request.
        max_pixels: Most pixels of all pictures of a request.
        idle: Seconds that a client may keep a connection waiting for its next bytes.
    """

    request_queue_size = 64
    daemon_threads = False  # server_close() waits for the request that is being scored

    def __init__(
        self,
        reward: Callable[..., Any],
        *,
        name: str | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
        max_bytes: int = 64 * 2**20,
        max_pixels: int = 64 * 2**20,
        idle: float = 30.0,
    ) -> None:
        if max_bytes < 1 or max_pixels < 1 or not idle > 0:
            raise InvalidArgumentError(
                "`max_bytes`, `max_pixels` and `idle` must be positive. Found "
                f"max_bytes={max_bytes}, max_pixels={max_pixels}, idle={idle}."
            )
        self.reward_name = str(name or getattr(reward, "name", type(reward).__name__))
        self.max_bytes, self.max_pixels, self.idle = max_bytes, max_pixels, idle
        self._reward = reward
        self._scoring = threading.Lock()
        self._closing = False
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """As the base class, without its reverse look-up of the host name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def server_close(self) -> None:
        """Stop: the request that is being scored is finished, those that wait for it are refused."""
        self._closing = True
        super().server_close()

    def health(self) -> dict[str, Any]:
        """The reply of /health."""
        return {"name": self.reward_name, "protocol": PROTOCOL, "version": gradbalance.__version__}

    def score(self, body: bytes, is_awaited: Callable[[], bool]) -> dict[str, Any]:
        """The reply of /score.

        Args:
            body: The request.
            is_awaited: Asked once it is this request's turn. A client that has timed out has asked again since: scoring
                for it would keep a slow server busy with answers that nobody reads.

        Raises:
            RefusalError: The request is wrong, nobody waits for it, or the reward failed.
        """
        try:
            prompts, metadata, texts = _read(body)
            images = decode_pngs(texts, self.max_pixels)
        except InvalidArgumentError as error:
            raise RefusalError(400, str(error)) from error
        with self._scoring:
            if self._closing:
                raise RefusalError(503, "The server is stopping.")
            if not is_awaited():
                raise RefusalError(408, "The client has left.")
            try:
                with torch.inference_mode():
                    returned = self._reward(images, prompts, **metadata)
                scores = check_scores(self.reward_name, returned, len(prompts))
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                raise RefusalError(500, f"{type(error).__name__}: {error}") from error
        return write_scores(scores.tolist(), lost_scores(returned))


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    server_version = "gradbalance"

    def setup(self) -> None:
        self.request.settimeout(self.server.idle)
        super().setup()

    def do_GET(self) -> None:
        if self.path == HEALTH:
            self._reply(200, self.server.health())
        else:
            self._reply(404, {"error": f"GET {HEALTH} or POST {SCORE}. Found GET {self.path}."})

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self.path != SCORE:
                raise RefusalError(404, f"GET {HEALTH} or POST {SCORE}. Found POST {self.path}.")
            self._reply(200, self.server.score(body, self._is_awaited))
        except RefusalError as error:
            self._reply(error.status, {"error": str(error)})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RefusalError(411, "A request must have a Content-Length.")
        size, limit = int(length), self.server.max_bytes
        if size > limit:
            # A client that is still sending would see a broken connection in place of the refusal.
            left = min(size, 16 * limit)
            while left and (read := len(self.rfile.read(min(left, _CHUNK)))):
                left -= read
            raise RefusalError(413, f"A request must have at most {limit} bytes. Found {size}: send fewer pictures.")
        body = self.rfile.read(size)
        if len(body) < size:
            raise RefusalError(400, f"A request must be complete. Found {len(body)} of {size} bytes.")
        return body

    def _is_awaited(self) -> bool:
        """Whether the client still holds the connection: from a closed one nothing is read, without waiting."""
        self.connection.settimeout(0)
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.connection.settimeout(self.server.idle)

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value, allow_nan=False).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError as error:
            self.log_message("reply lost: %s", error)


def _read(body: bytes) -> tuple[list[str], dict[str, list[Any]], list[str]]:
    """Prompts, metadata and encoded pictures of a request."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"A request must be JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidArgumentError("A request must be an object with `images`, `prompts` and `metadata`.")
    images, prompts = _texts(request, "images"), _texts(request, "prompts")
    metadata = request.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(column, list) for column in metadata.values()):
        raise InvalidArgumentError("`metadata` must be an object of lists.")
    wrong = {key: len(column) for key, column in {"prompts": prompts, **metadata}.items() if len(column) != len(images)}
    if wrong:
        raise InvalidArgumentError(f"Lists must be as long as `images`, {len(images)}. Found lengths {wrong}.")
    if refused := [key for key in metadata if key in RESERVED]:
        raise InvalidArgumentError(f"Keys of `metadata` must be others than {list(RESERVED)}. Found {refused}.")
    return prompts, metadata, images


def _texts(request: dict[str, Any], key: str) -> list[str]:
    found = request.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise InvalidArgumentError(f"`{key}` must be a list of texts, at least one.")
    return found
