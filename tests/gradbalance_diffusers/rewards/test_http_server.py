from __future__ import annotations

import base64
import http.client
import io
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards import HTTPReward
from gradbalance_diffusers.rewards.http_png import decode_pngs, encode_png
from gradbalance_diffusers.rewards.http_server import RewardServer
from gradbalance_diffusers.rewards.serve import main

PNG = encode_png(torch.zeros(3, 4, 4))
GOOD: dict[str, Any] = {"images": [PNG, PNG], "prompts": ["a", "b"], "metadata": {"source": ["x", None]}}


class Sources:
    """Scores 1 where the source is x; a reward may return a tensor."""

    name = "sources"

    def __call__(self, images: Tensor, prompts: list[str], source: list[Any]) -> Tensor:
        return torch.tensor([float(entry == "x") for entry in source])


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    with RewardServer(Sources(), max_bytes=20_000, max_pixels=100, idle=0.3) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def request(server: RewardServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, headers)
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


def test_health_and_scores(server: RewardServer) -> None:
    status, health = request(server, "GET", "/health")
    assert (status, health["name"], health["protocol"]) == (200, "sources", 1)
    assert health["version"]
    assert request(server, "POST", "/score", GOOD) == (200, {"scores": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "JSON"),
        (b"[" * 10_000, "JSON"),
        ([], "object"),
        (GOOD | {"images": []}, "`images`"),
        (GOOD | {"images": [1, 2]}, "`images`"),
        (GOOD | {"images": None}, "`images`"),
        (GOOD | {"prompts": "ab"}, "`prompts`"),
        (GOOD | {"prompts": ["a"]}, "'prompts': 1"),
        (GOOD | {"metadata": {"source": ["x"]}}, "'source': 1"),
        (GOOD | {"metadata": {"source": "xx"}}, "`metadata`"),
        (GOOD | {"metadata": [1]}, "`metadata`"),
        (GOOD | {"metadata": {"prompts": ["x", "x"]}}, "others than"),
        (GOOD | {"images": [PNG, "no base64!"]}, "Number 1 cannot be read"),
        (GOOD | {"images": [PNG, base64.b64encode(b"GIF89a").decode()]}, "Number 1 cannot be read"),
    ],
)
def test_bad_requests_are_explained(server: RewardServer, body: Any, message: str) -> None:
    status, answer = request(server, "POST", "/score", body)
    assert status == 400
    assert message in answer["error"]


def test_limits(server: RewardServer) -> None:
    status, answer = request(server, "POST", "/score", b"x" * 20_001)
    assert status == 413
    assert "20000 bytes. Found 20001" in answer["error"]
    status, answer = request(server, "POST", "/score", GOOD | {"images": [encode_png(torch.zeros(3, 8, 8))] * 2})
    assert status == 400
    assert "100 pixels in all. Found 128" in answer["error"]


def test_other_paths_and_lengths(server: RewardServer) -> None:
    assert request(server, "GET", "/score")[0] == 404
    assert request(server, "POST", "/", GOOD)[0] == 404
    assert request(server, "POST", "/score", None, **{"Content-Length": "-1"})[0] == 411
    with socket.create_connection(server.server_address[:2], timeout=30) as raw:
        raw.sendall(b"POST /score HTTP/1.0\r\n\r\n")
        assert b" 411 " in raw.makefile("rb").readline()


def test_a_client_that_stalls_is_let_go(server: RewardServer) -> None:
    """It announces more than it sends; others are served meanwhile."""
    with socket.create_connection(server.server_address[:2], timeout=30) as stalled:
        stalled.sendall(b"POST /score HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")
        assert request(server, "POST", "/score", GOOD)[0] == 200
        assert stalled.recv(100) == b""


def test_a_request_that_ends_early(server: RewardServer) -> None:
    with socket.create_connection(server.server_address[:2], timeout=30) as raw:
        raw.sendall(b"POST /score HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")
        raw.shutdown(socket.SHUT_WR)
        assert b"Found 1 of 100 bytes" in raw.makefile("rb").read()


def test_scores_of_a_wrong_form_are_an_error_of_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardServer(lambda images, prompts, **metadata: [1.0], name="short") as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        status, answer = request(server, "POST", "/score", GOOD)
        server.shutdown()
    assert status == 500
    assert "'short' must return one score per sample, 2 in all. Found 1" in answer["error"]


def test_stopping_finishes_what_is_scored_and_refuses_what_waits() -> None:
    go, scoring = threading.Event(), threading.Event()

    def slow(images: Tensor, prompts: list[str]) -> list[float]:
        scoring.set()
        assert go.wait(30)
        return [1.0] * len(prompts)

    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        found[name] = request(server, "POST", "/score", GOOD | {"metadata": {}})

    server = RewardServer(slow)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    first, second = threading.Thread(target=ask, args=("first",)), threading.Thread(target=ask, args=("second",))
    first.start()
    assert scoring.wait(30)
    second.start()
    while len(server._threads) < 2:  # type: ignore[arg-type]
        go.wait(0.005)
    server.shutdown()
    closing = threading.Thread(target=server.server_close)
    closing.start()
    while not server._closing:
        go.wait(0.005)
    go.set()
    for thread in (first, second, closing):
        thread.join()
    assert found["first"] == (200, {"scores": [1.0, 1.0]})
    assert found["second"][0] == 503


def header_only(side: int) -> str:
    """A PNG that says that it is large, and ends before it has to be."""
    fields = struct.pack(">II5B", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", fields), (b"IDAT", zlib.compress(bytes(64)))]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


class TestPNG:
    @pytest.mark.parametrize("size", [(1, 1), (5, 3), (16, 16)])
    def test_eight_bits_survive(self, size: tuple[int, int]) -> None:
        images = torch.randint(0, 256, (2, 3, *size), generator=torch.Generator().manual_seed(0)) / 255
        assert torch.equal(decode_pngs([encode_png(image) for image in images], 512), images)

    def test_scaled(self) -> None:
        image = torch.full((3, 6, 4), 0.2)
        assert decode_pngs([encode_png(image, (8, 2))], 16).shape == (1, 3, 8, 2)

    def test_a_small_file_with_a_huge_picture_is_not_unpacked(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"400000000 pixels.* exceeds limit"):  # Pillow's own
            decode_pngs([header_only(20_000)], 2**26)
        with pytest.raises(InvalidArgumentError, match="100000000: send fewer"):  # Pillow only warns of this size
            decode_pngs([header_only(10_000)], 2**26)

    def test_a_file_cut_off(self) -> None:
        noise = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
        whole = base64.b64decode(encode_png(noise))
        for length in (0, 10, 40, len(whole) // 2):
            with pytest.raises(InvalidArgumentError, match="Number 0 cannot be read"):
                decode_pngs([base64.b64encode(whole[:length]).decode()], 2**20)

    def test_other_modes_and_sizes(self) -> None:
        file = io.BytesIO()
        Image.fromarray(np.full((4, 4), 51, dtype=np.uint8)).save(file, format="PNG")
        grey = base64.b64encode(file.getvalue()).decode()
        assert torch.equal(decode_pngs([grey, PNG], 64)[0], torch.full((3, 4, 4), 0.2))
        with pytest.raises(InvalidArgumentError, match=r"one size.*\(2, 2\).*\(4, 4\)"):
            decode_pngs([PNG, encode_png(torch.zeros(3, 2, 2))], 64)


@pytest.mark.parametrize("option", [{"max_bytes": 0}, {"max_pixels": 0}, {"idle": 0.0}])
def test_bad_limits(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(option))):
        RewardServer(Sources(), **option)


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["saturatio"], "Did you mean 'saturation'"),
            (["ocr", "--option", "threads"], "--option must look like key=value"),
            (["ocr", "--option", "threds=2"], "threds"),
            (["ocr", "--option", "threads=[1"], "--option threads="),
            (["saturation", "--port", "70000"], "cannot listen on 127.0.0.1:70000"),
            (["saturation", "--port", "0", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
            (["saturation", "--port", "0", "--max-mib", "0"], "max_bytes=0"),
        ],
    )
    def test_mistakes(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert message in capsys.readouterr().err

    def test_a_port_in_use(self, server: RewardServer, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["saturation", "--port", str(server.server_address[1])])
        assert "cannot listen on" in capsys.readouterr().err

    def test_serves_until_sigterm(self) -> None:
        command = [sys.executable, "-m", "gradbalance_diffusers.rewards.serve", "ocr", "--port", "0"]
        with subprocess.Popen(
            [*command, "--option", "threads=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                url = line.split(" at ")[1].split()[0]
                assert HTTPReward(url, serves="ocr")(torch.zeros(1, 3, 16, 16), ["no quotes"]) == [None]
                process.send_signal(signal.SIGTERM)
                rest, errors = process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == 0
        assert "Stopping" in rest
        assert "Traceback" not in errors
