from __future__ import annotations

import math
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards import HTTPReward, LostScore, RewardError, RewardSet
from gradbalance_diffusers.rewards.http_client import RemoteError
from gradbalance_diffusers.rewards.http_png import decode_pngs
from gradbalance_diffusers.rewards.http_protocol import read_scores, write_scores
from gradbalance_diffusers.rewards.http_server import RewardServer
from scripted_server import ScriptedServer, die, hang, reply

HEALTHY = reply({"name": "fake", "protocol": 1})
IMAGES = (torch.arange(5 * 3 * 4 * 4) % 256).view(5, 3, 4, 4) / 255
PROMPTS = list("abcde")
QUICK: dict[str, Any] = {"retries": 1, "backoff": 0.01, "timeout": 5.0, "check": False}


def scores(*values: float | None) -> Any:
    return reply({"scores": list(values)})


@pytest.fixture
def serve() -> Iterator[Callable[..., RewardServer]]:
    """A function that serves a reward; the server stops with the test."""
    running = []

    def start(reward: Callable[..., Any], **options: Any) -> RewardServer:
        server = RewardServer(reward, **options)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


def test_requests_hold_the_samples_in_order() -> None:
    with ScriptedServer(scores(0.0, 1.0), scores(2, None), scores(4)) as server:
        found = HTTPReward(server.url, batch_size=2, check=False)(IMAGES, PROMPTS, source=list("vwxyz"), count=[1] * 5)
    assert found == [0.0, 1.0, 2.0, None, 4.0]
    paths, bodies = zip(*server.requests, strict=True)
    assert set(paths) == {"/score"}
    assert [body["prompts"] for body in bodies] == [["a", "b"], ["c", "d"], ["e"]]
    assert bodies[1]["metadata"] == {"source": ["x", "y"], "count": [1, 1]}
    sent = torch.cat([decode_pngs(body["images"], 64) for body in bodies])
    assert torch.equal(sent, IMAGES)


def test_pictures_are_rounded_to_eight_bits() -> None:
    image = torch.tensor([-1.0, 0.1, 0.5, 2.0]).expand(1, 3, 2, 4)
    with ScriptedServer(scores(0.0)) as server:
        HTTPReward(server.url, check=False)(image, ["a"])
    sent = decode_pngs(server.requests[0][1]["images"], 64)
    assert torch.equal(sent, (image.clamp(0, 1) * 255).round() / 255)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>", "not JSON; it begins with '<html>'"),
        ([0.0] * 5, "no list 'scores'"),
        ({"scores": 0.5}, "no list 'scores'"),
        ({"scores": [0.0]}, "1 scores for 5 samples"),
        ({"scores": [0.0] * 6}, "6 scores for 5 samples"),
        ({"scores": [0.0, 1.0, "high", 0.0, 0.0]}, "'high' for sample 2"),
        ({"scores": [0.0, True, 0.0, 0.0, 0.0]}, "True for sample 1"),
        ({"scores": [0.0, 0.0, 0.0, 0.0, [1.0]]}, r"\[1.0\] for sample 4"),
        (b'{"scores": [NaN, 0, 0, 0, 0]}', "nan for sample 0"),
        (b'{"scores": [0, 0, 0, 0, -Infinity]}', "-inf for sample 4"),
        (b'{"scores": [0, 1e999, 0, 0, 0]}', "inf for sample 1"),
        ({"scores": [0.0] * 5, "errors": ["lost"]}, "1 errors for 5 samples"),
        ({"scores": [0.0] * 5, "errors": "lost"}, "no list 'errors'"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_garbage(answer: Any, message: str, on_error: Any) -> None:
    with ScriptedServer(reply(answer)) as server:
        reward = HTTPReward(server.url, on_error=on_error, **QUICK)
        if on_error == "raise":
            with pytest.raises(RemoteError, match=f"Samples 0 to 4: .*{message}"):
                reward(IMAGES, PROMPTS)
        else:
            lost = reward(IMAGES, PROMPTS)
            assert len(lost) == 5
            assert all(isinstance(score, LostScore) and re.search(message, score.reason) for score in lost)


def test_what_was_lost_is_masked_and_counted_and_the_rest_is_kept() -> None:
    """The second of three requests meets a server that answers 500 to it, however often it is asked."""
    broken = reply({"error": "engine broke"}, 500)
    with ScriptedServer(scores(0.0, 1.0), broken, broken, scores(4.0)) as server:
        rewards = RewardSet([HTTPReward(server.url, batch_size=2, on_error="mask", **QUICK)], workers=1)
        with pytest.warns(RuntimeWarning, match=r"'http' lost the scores of 2 samples .*sample 2 .*'c'.*engine broke"):
            table = rewards(IMAGES, PROMPTS)
    assert table.values[[0, 1, 4], 0].tolist() == [0.0, 1.0, 4.0]
    assert table.mask[:, 0].tolist() == [True, True, False, False, True]
    assert table.errors == {"http": 2}


def test_a_failure_stops_with_reward_and_samples_named() -> None:
    with ScriptedServer(scores(0.0, 1.0), reply({"error": "no"}, 400)) as server:
        rewards = RewardSet({"far": HTTPReward(server.url, batch_size=2, **QUICK)}, workers=1)
        with pytest.raises(RewardError, match=r"'far' raised RemoteError: Samples 2 to 3: .*status 400") as info:
            rewards(IMAGES, PROMPTS)
    assert info.value.reward == "far"
    assert len(server.requests) == 2  # the third request is not made


def test_a_server_that_dies_and_comes_back() -> None:
    """One batch while it lives, one while it is away, one after it is back: only the second is lost."""
    with ScriptedServer(scores(1.0, 1.0), die()) as server:
        reward = HTTPReward(server.url, on_error="mask", **QUICK)
        rewards = RewardSet([reward], workers=1)
        first = rewards(IMAGES[:2], PROMPTS[:2])
        with pytest.warns(RuntimeWarning, match="connection broke"):
            cut = rewards(IMAGES[:2], PROMPTS[:2])
    with pytest.warns(RuntimeWarning, match="cannot connect"):
        away = rewards(IMAGES[:2], PROMPTS[:2])
    with ScriptedServer(scores(2.0, 2.0), port=server.port), warnings.catch_warnings():
        warnings.simplefilter("error")
        back = rewards(IMAGES[:2], PROMPTS[:2])
    tables = type(first).concatenate([first, cut, away, back])
    assert tables.mask[:, 0].tolist() == [True, True, False, False, False, False, True, True]
    assert tables.errors == {"http": 4}


@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_a_slow_server_does_not_outlast_the_deadline(on_error: Any) -> None:
    release = threading.Event()
    with ScriptedServer(scores(1.0), hang(release)) as server:
        try:
            options = QUICK | {"timeout": 30.0, "retries": 100}
            reward = HTTPReward(server.url, batch_size=1, deadline=1.0, on_error=on_error, **options)
            if on_error == "raise":
                with pytest.raises(RemoteError, match=r"Samples 1 to 1: .*its time is up"):
                    reward(IMAGES, PROMPTS)
            else:
                found = reward(IMAGES, PROMPTS)
                assert found[0] == 1.0
                assert all(isinstance(score, LostScore) and "time is up" in score.reason for score in found[1:])
        finally:
            release.set()
    assert len(server.requests) == 2


def test_health_is_asked_first() -> None:
    with ScriptedServer(HEALTHY) as server:
        assert HTTPReward(server.url).check() == "fake"
        HTTPReward(server.url, serves="fake")
        with pytest.raises(InvalidArgumentError, match=r"server of 'ocr'.*serves 'fake'"):
            HTTPReward(server.url, serves="ocr")
    assert {path for path, _ in server.requests} == {"/health"}
    with pytest.raises(RemoteError, match=r"cannot connect.*Start the server first .*check=False"):
        HTTPReward(server.url, **QUICK | {"check": True})
    HTTPReward(server.url, check=False)


@pytest.mark.parametrize("answer", [[], {"name": "ocr"}, {"name": "ocr", "protocol": 2}, {"name": 1, "protocol": 1}])
def test_another_server_at_the_address(answer: Any) -> None:
    with ScriptedServer(reply(answer)) as server, pytest.raises(RemoteError, match=r"answered with no \{'name'"):
        HTTPReward(server.url)


@pytest.mark.parametrize("option", [{"batch_size": 0}, {"deadline": 0.0}, {"on_error": "ignore"}])
def test_bad_options(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(option))):
        HTTPReward("http://127.0.0.1:1", check=False, **option)


def test_metadata_that_json_cannot_express() -> None:
    reward = HTTPReward("http://127.0.0.1:1", check=False)
    for value in (object(), math.nan):
        with pytest.raises(InvalidArgumentError, match=r"\['thing'\]"):
            reward(IMAGES[:1], ["a"], thing=[value])


@pytest.mark.parametrize(
    ("values", "lost"), [([0.5, math.nan, -1.0], {}), ([math.nan, 2.0, math.nan], {2: "no answer"}), ([1.0], {})]
)
def test_scores_survive_the_way_there_and_back(values: list[float], lost: dict[int, str]) -> None:
    found = read_scores(write_scores(values, lost), len(values))
    assert [math.nan if score is None else score for score in found] == pytest.approx(values, nan_ok=True)
    assert {i: score.reason for i, score in enumerate(found) if isinstance(score, LostScore)} == lost


class TestRoundTrip:
    def test_saturation(self, serve: Callable[..., RewardServer]) -> None:
        from gradbalance_diffusers.rewards import Saturation

        squares = torch.ones(3, 3, 32, 32)
        squares[:, 1:, 8:24, 8:24] = torch.tensor([10, 100, 200]).view(3, 1, 1, 1) / 255
        local = Saturation()(squares, PROMPTS[:3])
        assert local == pytest.approx([245 / 255, 155 / 255, 55 / 255])
        remote = HTTPReward(serve(Saturation()).url, batch_size=2, serves="saturation")
        assert remote(squares, PROMPTS[:3]) == local

    def test_ocr_with_its_routing(self, serve: Callable[..., RewardServer]) -> None:
        from PIL import Image, ImageDraw, ImageFont

        from gradbalance_diffusers.rewards import OCR

        picture = Image.new("RGB", (32, 32), "white")
        ImageDraw.Draw(picture).text((3, 8), "427", fill="red", font=ImageFont.load_default(size=16))
        image = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1) / 255
        batch = image.expand(4, 3, 32, 32)
        prompts = ['a sign that says "427"', 'a sign that says "421"', 'a sign that says "427"', "a sign"]
        sources = ["ocr", "ocr", "general", None]
        local = OCR()(batch, prompts, source=sources)
        assert local == [1.0, pytest.approx(2 / 3), None, None]
        assert HTTPReward(serve(OCR()).url)(batch, prompts, source=sources) == local

    def test_lost_scores_stay_lost(self, serve: Callable[..., RewardServer]) -> None:
        server = serve(lambda images, prompts: [0.5, None, LostScore("no answer")])
        found = HTTPReward(server.url)(IMAGES[:3], PROMPTS[:3])
        assert found[:2] == [0.5, None]
        assert isinstance(found[2], LostScore)
        assert found[2].reason == "no answer"

    def test_a_reward_that_fails_on_the_server(
        self, serve: Callable[..., RewardServer], capfd: pytest.CaptureFixture[str]
    ) -> None:
        def fails(images: Tensor, prompts: list[str]) -> list[float]:
            raise ZeroDivisionError("engine broke")

        with pytest.raises(RemoteError, match=r"2 attempts: status 500 .*ZeroDivisionError: engine broke"):
            HTTPReward(serve(fails).url, **QUICK)(IMAGES, PROMPTS)
        assert "Traceback" in capfd.readouterr().err

    def test_one_call_at_a_time_and_none_for_those_who_left(self, serve: Callable[..., RewardServer]) -> None:
        """A client that times out asks again; the server computes only what somebody waits for."""
        go, calls, inside = threading.Event(), [], []

        def slow(images: Tensor, prompts: list[str]) -> list[float]:
            inside.append(threading.get_ident())
            assert len(inside) == 1
            calls.append(prompts[0])
            assert go.wait(30)
            inside.pop()
            return [float(len(prompts))] * len(prompts)

        server = serve(slow)
        patient = threading.Thread(target=HTTPReward(server.url, **QUICK), args=(IMAGES[:1], ["first"]))
        patient.start()
        while not calls:
            time.sleep(0.001)
        hasty = HTTPReward(server.url, on_error="mask", **QUICK | {"timeout": 0.1, "retries": 3})
        assert isinstance(hasty(IMAGES[:1], ["left"])[0], LostScore)
        go.set()
        patient.join()
        assert HTTPReward(server.url, **QUICK)(IMAGES[:2], ["last", "last"]) == [2.0, 2.0]
        assert calls == ["first", "last"]
