from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.http_client import LARGEST_REPLY, JSONEndpoint, RemoteError
from scripted_server import Behaviour, ScriptedServer, die, drip, hang, reply

OK = reply({"answer": 42})


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets go of hanging servers when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def answer(reply: Any) -> int:
    if not isinstance(reply, dict) or "answer" not in reply:
        raise ValueError("no 'answer'")
    return int(reply["answer"])


def ask(server: ScriptedServer, release: threading.Event | None = None, seconds: float = 30.0, **options: Any) -> int:
    endpoint = JSONEndpoint(server.url, **{"retries": 2, "backoff": 0.01, "timeout": 5.0} | options)
    try:
        return endpoint.post("/ask", {"question": 1}, answer, time.monotonic() + seconds)
    finally:
        if release is not None:  # the server waits for its threads
            release.set()


def test_a_request() -> None:
    with ScriptedServer(OK) as server:
        assert ask(server) == 42
        assert JSONEndpoint(server.url + "/base/").get("/health", answer, time.monotonic() + 30) == 42
    assert server.requests == [("/ask", {"question": 1}), ("/base/health", None)]


@pytest.mark.parametrize(
    "trouble",
    [
        reply({"error": "engine broke"}, 500),
        reply(b"starting", 503),
        reply({"error": "slow down"}, 429),
        reply({}, 408),
        die(),
        die(b"HTTP/1.0 200 OK\r\nContent-Le"),
        die(b'HTTP/1.0 200 OK\r\nContent-Length: 14\r\n\r\n{"answer": 4'),
        die(b'HTTP/1.0 200 OK\r\n\r\n{"answer": 4'),
        die(b"what?\r\n\r\n"),
        reply(b"<html>gateway</html>"),
        reply(b"\xff\xfe"),
        reply(b""),
        reply(b"[" * 100_000),
    ],
)
def test_trouble_that_may_pass_is_tried_again(trouble: Behaviour) -> None:
    with ScriptedServer(trouble, trouble, OK) as server:
        assert ask(server) == 42
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (reply({"error": "engine broke"}, 500), r"3 attempts: status 500 .*engine broke"),
        (reply(b"<html>gateway</html>"), r"3 attempts: the reply is not JSON; it begins with '<html>gateway</html>'"),
        (reply(b""), r"not JSON; it is empty"),
        (die(), r"3 attempts: the connection broke"),
        (die(b'HTTP/1.0 200 OK\r\nContent-Length: 14\r\n\r\n{"answer": 4'), r"the connection broke"),
    ],
)
def test_trouble_that_does_not_pass(trouble: Behaviour, message: str) -> None:
    with ScriptedServer(trouble) as server, pytest.raises(RemoteError, match=f"POST {server.url}/ask.*{message}"):
        ask(server)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (reply({"error": "no such page"}, 404), r"status 404 Not Found; the body begins with '.*no such page"),
        (reply({"error": "too large"}, 413), "status 413"),
        (reply(b"", 302), "status 302 Found; the body is empty"),
        (reply([1, 2]), r"answered with no 'answer'; the body begins with '\[1, 2\]'"),
        (reply({"scores": ["x" * 1000]}), r"no 'answer'; the body begins with '.{200}'\.$"),
        (reply(b" " * LARGEST_REPLY), f"{LARGEST_REPLY} bytes or more"),
    ],
)
def test_mistakes_are_not_tried_again(mistake: Behaviour, message: str) -> None:
    with ScriptedServer(mistake) as server, pytest.raises(RemoteError, match=message):
        ask(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "sent", [None, b"", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\nX: ", b"HTTP/1.0 200 OK\r\n\r\n{"]
)
def test_a_slow_reply_is_left_and_tried_again(sent: bytes | None, release: threading.Event) -> None:
    """Also one that drips in, of which every byte is in time."""
    slow = hang(release) if sent is None else drip(release, sent)
    with ScriptedServer(slow, OK) as server:
        assert ask(server, release, timeout=0.3) == 42
    assert 2 <= len(server.requests) <= 3  # on a busy machine the good reply can be late too


@pytest.mark.parametrize("sent", [None, b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_server_that_stays_slow(sent: bytes | None, release: threading.Event) -> None:
    slow = hang(release) if sent is None else drip(release, sent)
    with ScriptedServer(slow) as server, pytest.raises(RemoteError, match=r"3 attempts: no .*reply within 0\.1 s"):
        ask(server, release, timeout=0.1)
    assert len(server.requests) == 3


def test_the_deadline_ends_everything(release: threading.Event) -> None:
    """Attempts, pauses between them, and the last attempt, which gets what is left."""
    with (
        ScriptedServer(hang(release)) as server,
        pytest.raises(RemoteError, match=r"1 attempt, and its time is up: no reply within 0\.[45]"),
    ):
        ask(server, release, seconds=0.5, timeout=30.0, retries=1000)
    assert len(server.requests) == 1
    with ScriptedServer(reply({}, 500)) as server, pytest.raises(RemoteError, match="its time is up"):
        ask(server, seconds=0.2, retries=1000, backoff=0.05)
    assert 1 <= len(server.requests) <= 4  # after 0, 0.05, 0.15 s
    with ScriptedServer(OK) as server, pytest.raises(RemoteError, match=r"0 attempts, and its time is up"):
        ask(server, seconds=-1.0)
    assert not server.requests


def test_nobody_listens() -> None:
    with ScriptedServer(OK) as server:
        pass
    with pytest.raises(RemoteError, match=r"3 attempts: cannot connect \(ConnectionRefusedError"):
        ask(server)


def test_a_full_queue_of_connections_is_left_after_the_connect_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        crowd = [socket.socket() for _ in range(8)]
        for waiting in crowd:
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        endpoint = JSONEndpoint(
            f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout=0.1, timeout=0.1, retries=0
        )
        with pytest.raises(RemoteError, match=r"cannot connect \(TimeoutError|no reply within 0.1"):
            endpoint.get("/", answer, time.monotonic() + 30)
        for waiting in crowd:
            waiting.close()


def test_a_server_that_comes_back() -> None:
    with ScriptedServer(OK) as first:
        assert ask(first) == 42
    servers: list[ScriptedServer] = []

    def come_back() -> None:
        servers.append(ScriptedServer(OK, port=first.port).__enter__())

    timer = threading.Timer(0.2, come_back)
    timer.start()
    try:
        assert ask(first, retries=1000, backoff=0.01) == 42
    finally:
        timer.join()
        servers[0].__exit__(None, None, None)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REWARD_KEY", " s3cret\n")
    with ScriptedServer(OK, reply({}, 403)) as server:
        assert ask(server, api_key_env="TEST_REWARD_KEY") == 42
        with pytest.raises(RemoteError, match="403") as info:
            ask(server, api_key_env="TEST_REWARD_KEY")
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(info.value)
    with pytest.raises(InvalidArgumentError, match="'NO_SUCH_KEY', which is not set"):
        JSONEndpoint("http://127.0.0.1:1", api_key_env="NO_SUCH_KEY")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:80",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host/?a=1",
        "http://a b/",
        "",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="`url`"):
        JSONEndpoint(url)


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgumentError, match="without user") as info:
        JSONEndpoint("http://me:s3cret@host/")
    assert "s3cret" not in str(info.value)


@pytest.mark.parametrize("option", [{"timeout": 0.0}, {"connect_timeout": -1.0}, {"retries": -1}, {"backoff": -0.1}])
def test_bad_options(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(option))):
        JSONEndpoint("http://127.0.0.1:1", **option)
