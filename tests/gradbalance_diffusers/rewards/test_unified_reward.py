from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards import LostScore, RewardSet, UnifiedReward
from gradbalance_diffusers.rewards.http_client import RemoteError
from gradbalance_diffusers.rewards.http_png import decode_pngs
from gradbalance_diffusers.rewards.unified_reward import read_mark
from scripted_server import Behaviour, ScriptedServer, hang, reply

IMAGES = torch.arange(3).view(3, 1, 1, 1).expand(3, 3, 8, 4) / 255
QUICK: dict[str, Any] = {"retries": 1, "backoff": 0.01, "timeout": 5.0, "check": False}


def says(text: Any) -> Behaviour:
    return reply({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Final Score: 4", 0.8),
        ("Final Score: 3.75\n", 0.75),
        ("It fits.\nFinal Score:5", 1.0),
        ("**Final Score:** 2", 0.4),
        ("final score: 4/5.", 0.8),
        ("Not yet Final Score: 1. After all, Final Score: 4.5", 0.9),
        ("Final Score: 1.0", 0.2),
    ],
)
def test_marks(answer: str, score: float) -> None:
    assert read_mark(answer) == pytest.approx(score)


@pytest.mark.parametrize("answer", ["", "4", "Final Score: good", "Final Score: 0.5", "Final Score: 10"])
def test_an_answer_without_a_mark_is_lost(answer: str) -> None:
    lost = read_mark(answer)
    assert isinstance(lost, LostScore)
    assert repr(answer) in lost.reason


def test_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", "k3y")
    template = 'Mark "{prompt}" as {"Final Score": x}.'
    with ScriptedServer(says("Final Score: 1"), says("Final Score: 2"), says("Final Score: 3")) as server:
        reward = UnifiedReward(
            server.url + "/v1", model="judge", template=template, parallel=1, api_key_env="TEST_JUDGE_KEY", **QUICK
        )
        assert reward(IMAGES, ["a", "b {x}", "c"], source=[None] * 3) == [0.2, 0.4, 0.6]
    assert all(headers["Authorization"] == "Bearer k3y" for headers in server.headers)
    for i, (path, body) in enumerate(server.requests):
        assert path == "/v1/chat/completions"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0, 512)
        (message,) = body["messages"]
        picture, question = message["content"]
        assert question == {"type": "text", "text": template.replace("{prompt}", ["a", "b {x}", "c"][i])}
        kind, data = picture["image_url"]["url"].split(",")
        assert kind == "data:image/png;base64"
        image = decode_pngs([data], 512 * 512)
        assert image.shape == (1, 3, 512, 512)
        assert image.unique().tolist() == pytest.approx([i / 255])


def test_what_is_lost_is_masked_and_counted() -> None:
    """One answer without a mark, and one request that fails for good."""
    answers = says("Final Score: 4"), says("A nice picture."), reply({"error": "overloaded"}, 400)
    with ScriptedServer(*answers) as server:
        rewards = RewardSet([UnifiedReward(server.url, parallel=1, on_error="mask", **QUICK)])
        with pytest.warns(RuntimeWarning, match=r"'unifiedreward' lost the scores of 2 .*sample 1.*'A nice picture\.'"):
            table = rewards(IMAGES, ["a", "b", "c"])
    assert table.mask[:, 0].tolist() == [True, False, False]
    assert table.values[0, 0] == 0.8
    assert table.errors == {"unifiedreward": 2}


def test_a_failing_request_stops_and_the_rest_is_not_asked() -> None:
    with ScriptedServer(says("Final Score: 4"), reply({}, 400)) as server:
        reward = UnifiedReward(server.url, parallel=1, **QUICK)
        with pytest.raises(RemoteError, match=r"Sample 1 with the prompt 'b': .*status 400"):
            reward(IMAGES.repeat(4, 1, 1, 1), list("abcdefghijkl"))
        asked = len(server.requests)
        assert asked < 12
        reward._workers[0].submit(lambda: None).result()  # the jobs left over have ended
        assert len(server.requests) <= asked + 1


@pytest.mark.parametrize(
    "answer", [{}, [], {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"choices": [{"message": "x"}]}]
)
def test_garbage(answer: Any) -> None:
    with ScriptedServer(reply(answer)) as server, pytest.raises(RemoteError, match=r"no text in choices\[0\]"):
        UnifiedReward(server.url, **QUICK)(IMAGES[:1], ["a"])


def test_requests_run_side_by_side_and_answers_keep_their_order() -> None:
    """Each is answered only when three have arrived, the last one first."""
    together, turn = threading.Barrier(3, timeout=30), [threading.Event() for _ in range(4)]
    turn[3].set()

    def behave(handler: Any) -> None:
        number = together.wait()
        mark = int(server.requests[number][1]["messages"][0]["content"][1]["text"])
        assert turn[mark].wait(30)
        says(f"Final Score: {mark}")(handler)
        turn[mark - 1].set()

    with ScriptedServer(behave) as server:
        reward = UnifiedReward(server.url, template="{prompt}", parallel=3, **QUICK)
        assert reward(IMAGES, ["1", "2", "3"]) == [0.2, 0.4, 0.6]


def test_a_slow_judge_does_not_outlast_the_deadline() -> None:
    release = threading.Event()
    with ScriptedServer(hang(release)) as server:
        try:
            reward = UnifiedReward(server.url, parallel=2, deadline=0.2, on_error="mask", **QUICK | {"timeout": 30.0})
            assert all(isinstance(score, LostScore) for score in reward(IMAGES, ["a", "b", "c"]))
        finally:
            release.set()


def test_the_model_is_looked_for() -> None:
    with ScriptedServer(reply({"data": [{"id": "judge"}, {"id": "other"}]})) as server:
        UnifiedReward(server.url, model="judge")
        with pytest.raises(InvalidArgumentError, match=r"\['judge', 'other'\]. Found 'judg'"):
            UnifiedReward(server.url, model="judg")
    assert {path for path, _ in server.requests} == {"/models"}
    with pytest.raises(RemoteError, match=r"cannot connect.*Start an OpenAI-compatible server"):
        UnifiedReward(server.url, **QUICK | {"check": True})
    with ScriptedServer(reply({"models": []})) as server, pytest.raises(RemoteError, match="no list of models"):
        UnifiedReward(server.url)


@pytest.mark.parametrize(
    "option", [{"template": "mark it"}, {"parallel": 0}, {"max_tokens": 0}, {"deadline": 0.0}, {"on_error": "zero"}]
)
def test_bad_options(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(option))):
        UnifiedReward("http://127.0.0.1:1", check=False, **option)
