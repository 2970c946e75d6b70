"""An HTTP server that misbehaves on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Behaviour = Callable[[BaseHTTPRequestHandler], None]


def reply(value: Any, status: int = 200) -> Behaviour:
    """Answer with JSON, or with the bytes themselves."""
    content = value if isinstance(value, bytes) else json.dumps(value).encode()

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return behave


def die(sent: bytes = b"") -> Behaviour:
    """Close the connection after these bytes."""
    return lambda handler: handler.wfile.write(sent) and None


def hang(release: threading.Event) -> Behaviour:
    """Say nothing until released."""
    return lambda handler: release.wait(30) and None


def drip(release: threading.Event, sent: bytes, every: float = 0.02) -> Behaviour:
    """Send the bytes, and then one byte now and then until released."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(sent)
        try:
            while not release.wait(every):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        except OSError:
            pass

    return behave


class ScriptedServer:
    """Runs one behaviour per request, the last one for all that follow; remembers what it was asked.

    Attributes:
        requests: Path and JSON of each request, in order of arrival.
        headers: Their headers.
    """

    def __init__(self, *behaviours: Behaviour, port: int = 0) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
                with lock:
                    number = len(self.requests)
                    self.requests.append((handler.path, json.loads(body) if body else None))
                    self.headers.append(dict(handler.headers))
                behaviours[min(number, len(behaviours) - 1)](handler)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
