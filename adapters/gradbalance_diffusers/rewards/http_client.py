"""JSON over HTTP for rewards that run elsewhere: every wait ends, and what may pass is tried again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gradbalance.errors import GradBalanceError, InvalidArgumentError

Read = TypeVar("Read")

LARGEST_REPLY = 2**24
"""Bytes of a reply that are read at most."""
_EXCERPT = 200  # characters of a reply that an error quotes
_DOUBLINGS = 6  # a server that is away for long is asked every 32 s with the default backoff
_COME_AGAIN = (408, 429)  # the two 4xx statuses that ask for another try


class RemoteError(GradBalanceError, RuntimeError):
    """A server gave no usable reply: it is away, too slow, refuses, or says something else than agreed."""


class _MayPassError(Exception):
    """One attempt failed in a way that another attempt may not."""


class JSONEndpoint:
    """Requests to one server; safe to use from several threads.

    Each attempt opens a connection of its own, so a server may be restarted at any time. An attempt is repeated after
    connection errors, timeouts, the statuses 5xx, 408 and 429, and replies that are no JSON (as one cut off in the
    middle), with pauses of ``backoff * 2**n`` seconds, n up to 6. Any other status, and JSON of a wrong form, fails at
    once. Redirects are not followed and proxies not used.

    Args:
        url: ``http://host:port/base`` or https.
        connect_timeout: Seconds to connect.
        timeout: Seconds from being connected to the last byte of the reply.
        retries: Attempts after the first.
        backoff: Seconds before the first of them.
        api_key_env: Environment variable with a key, sent as ``Authorization: Bearer``.

    Raises:
        InvalidArgumentError: A value out of range, another kind of URL, or a variable that is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.5,
        api_key_env: str | None = None,
    ) -> None:
        self._secure, self._host, self._port, self._base = _parts(url)
        if not (connect_timeout > 0 and timeout > 0 and retries >= 0 and backoff >= 0):
            raise InvalidArgumentError(
                "`connect_timeout` and `timeout` must be positive, `retries` and `backoff` not negative. Found "
                f"connect_timeout={connect_timeout}, timeout={timeout}, retries={retries}, backoff={backoff}."
            )
        self.url = url.rstrip("/")
        self._connect_timeout, self._timeout = connect_timeout, timeout
        self._retries, self._backoff = retries, backoff
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {_key(api_key_env)}"

    def get(self, path: str, read: Callable[[Any], Read], until: float) -> Read:
        """What ``read`` makes of the JSON at ``path``; see :meth:`post`."""
        return self._request("GET", path, None, read, until)

    def post(self, path: str, payload: Any, read: Callable[[Any], Read], until: float) -> Read:
        """What ``read`` makes of the JSON that the server answers to ``payload``.

        Args:
            path: Appended to the URL.
            payload: Anything that JSON can express.
            read: Raises ValueError, saying what is wrong, for a reply of a wrong form.
            until: Time of :func:`time.monotonic` at which the request fails if it has not succeeded.

        Raises:
            RemoteError: No usable reply; names the request, and what happened last.
        """
        return self._request("POST", path, json.dumps(payload, allow_nan=False).encode(), read, until)

    def _request(self, method: str, path: str, body: bytes | None, read: Callable[[Any], Read], until: float) -> Read:
        what = f"{method} {self.url}{path}"
        failure = "no time was left for it"
        attempts = 0
        while attempts <= self._retries and (left := until - time.monotonic()) > 0:
            attempts += 1
            try:
                content = self._attempt(method, path, body, left)
                reply = _parse(content)
            except _MayPassError as error:
                failure = str(error)
            else:
                try:
                    return read(reply)
                except ValueError as error:
                    raise RemoteError(f"{what} was answered with {error}; the body {_excerpt(content)}.") from error
            if attempts <= self._retries:
                pause = self._backoff * 2 ** min(attempts - 1, _DOUBLINGS)
                time.sleep(max(0.0, min(pause, until - time.monotonic())))
        late = "" if attempts > self._retries else ", and its time is up"
        raise RemoteError(f"{what} failed after {attempts} attempt{'s' * (attempts != 1)}{late}: {failure}.")

    def _attempt(self, method: str, path: str, body: bytes | None, left: float) -> bytes:
        """The body of a reply with status 200, within ``left`` seconds."""
        connection_class = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connection_class(self._host, self._port, timeout=min(self._connect_timeout, left))
        try:
            connection.connect()
        except OSError as error:
            raise _MayPassError(f"cannot connect ({type(error).__name__}: {error})") from error
        limit = min(self._timeout, left)
        sock = connection.sock  # the connection lets go of it once the headers are there
        expired = threading.Event()

        def cut() -> None:
            # A socket's own timeout starts anew with every byte, so a reply that drips in would never end. SSLSocket's
            # shutdown changes the object that the other thread reads from; the plain socket's does not.
            expired.set()
            with contextlib.suppress(OSError):  # already closed
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

        watchdog = threading.Timer(limit, cut)
        watchdog.daemon = True
        watchdog.start()
        try:
            sock.settimeout(limit)
            connection.request(method, self._base + path, body=body, headers=self._headers)
            with connection.getresponse() as response:
                content = response.read(LARGEST_REPLY)
                rest = response.length  # of the announced length; None if none was
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise _MayPassError(f"no reply within {limit:.3g} s") from error
            raise _MayPassError(f"the connection broke ({type(error).__name__}: {error})") from error
        finally:
            watchdog.cancel()
            connection.close()
        if expired.is_set():  # without an announced length a cut reply looks complete
            raise _MayPassError(f"no complete reply within {limit:.3g} s")
        if response.status != 200:
            problem = f"status {response.status} {response.reason}; the body {_excerpt(content)}"
            if response.status >= 500 or response.status in _COME_AGAIN:
                raise _MayPassError(problem)
            raise RemoteError(f"{method} {self.url}{path} was answered with {problem}.")
        if len(content) == LARGEST_REPLY:
            raise RemoteError(f"{method} {self.url}{path} was answered with {LARGEST_REPLY} bytes or more.")
        if rest:
            raise _MayPassError(f"the connection broke, {rest} bytes before the end of the reply")
        return content


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _MayPassError(f"the reply is not JSON; it {_excerpt(content)}") from error


def _excerpt(content: bytes) -> str:
    return f"begins with {content.decode(errors='replace')[:_EXCERPT]!r}" if content else "is empty"


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """Whether it is https, the host, the port and the path of a URL."""
    try:
        split = urlsplit(url)
        fits = split.scheme in ("http", "https") and bool(split.hostname) and split.username is None
        fits = fits and not (split.query or split.fragment) and url.isprintable() and " " not in url
        port = split.port
    except ValueError:
        fits = False
    if not fits:
        shown = url if "@" not in url else "one with '@'"  # what stands before it may be a password
        raise InvalidArgumentError(
            "`url` must look like http://host:port or https://host/path, without user, query and fragment (keys come "
            f"from an environment variable). Found {shown!r}."
        )
    return split.scheme == "https", split.hostname or "", port, split.path.rstrip("/")


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InvalidArgumentError(
            f"`api_key_env` must name an environment variable that holds the key. Found {variable!r}, which is not set."
        )
    return key
