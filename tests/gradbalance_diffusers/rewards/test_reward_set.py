from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbalance.errors import GradBalanceError, InvalidArgumentError
from gradbalance_diffusers.rewards import LostScore, Reward, RewardError, RewardSet, RewardTable

PROMPTS = ["a", "b", "c"]
IMAGES = torch.linspace(0, 1, 3).view(3, 1, 1, 1).expand(3, 3, 4, 4)


def returns(value: Any) -> Callable[..., Any]:
    return lambda images, prompts, **metadata: value


def fails(images: Tensor, prompts: list[str], **metadata: Any) -> list[float]:
    raise ZeroDivisionError("engine broke")


class Brightness:
    name = "brightness"

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
        return images.mean(dim=(1, 2, 3))


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_columns_in_order_and_never_averaged(workers: int) -> None:
    rewards = RewardSet({"x": returns([1, 2, 3]), "y": returns([0.5, None, math.nan])}, workers=workers)
    table = rewards(IMAGES, PROMPTS, [{}, {}, {}])
    assert rewards.names == table.names == ("x", "y")
    assert table.values.dtype == torch.float64
    assert table.values[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert table.values[0, 1] == 0.5
    assert table.values[1:, 1].isnan().all()
    assert table.mask.tolist() == [[True, True], [True, False], [True, False]]
    assert table.errors == {"x": 0, "y": 0}


def test_a_reward_object_satisfies_the_protocol() -> None:
    assert isinstance(Brightness(), Reward)
    table = RewardSet([Brightness()])(IMAGES, PROMPTS)
    assert table.names == ("brightness",)
    assert table.values.flatten().tolist() == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1, 0, 1]),
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1.0, 0.0, 1.0], dtype=np.float16),
        [True, False, True],
        (np.float32(1), torch.tensor(0.0), 1),
    ],
)
def test_numbers_of_many_kinds(value: Any) -> None:
    table = RewardSet({"x": returns(value)})(IMAGES, PROMPTS)
    assert table.values.flatten().tolist() == [1.0, 0.0, 1.0]
    assert table.values.dtype == torch.float64


def test_metadata_becomes_lists_over_the_union_of_keys() -> None:
    seen: dict[str, Any] = {}

    def reward(images: Tensor, prompts: list[str], **metadata: Any) -> list[float]:
        seen.update(metadata, images=images, prompts=prompts)
        return [0.0, 0.0, 0.0]

    RewardSet({"x": reward})(IMAGES, PROMPTS, [{"source": "ocr"}, {}, {"source": "geneval", "include": [1]}])
    assert seen.pop("images") is IMAGES
    assert seen == {"prompts": PROMPTS, "source": ["ocr", None, "geneval"], "include": [None, None, [1]]}


def test_one_reward_cannot_change_what_the_next_one_sees() -> None:
    def vandal(images: Tensor, prompts: list[str], **metadata: Any) -> list[float]:
        prompts.clear()
        metadata["source"].clear()
        return [0.0, 0.0, 0.0]

    def lengths(images: Tensor, prompts: list[str], source: list[Any]) -> list[float]:
        return [float(len(prompts) == len(source) == 3)] * 3

    table = RewardSet({"vandal": vandal, "next": lengths})(IMAGES, PROMPTS, [{"source": 1}] * 3)
    assert table.values[:, 1].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_run_without_gradient(workers: int) -> None:
    rewards = RewardSet({"x": lambda images, prompts: [float(torch.is_grad_enabled())] * 3}, workers=workers)
    assert not rewards(IMAGES, PROMPTS).values.any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"'x'.*3 in all.*Found 1"),
        ([1.0] * 5, r"'x'.*3 in all.*Found 5"),
        (1.0, r"'x'.*sequence of 3.*float"),
        (torch.tensor(1.0), r"'x'.*\(3,\).*\(\)"),
        (torch.ones(3, 1), r"'x'.*\(3,\).*\(3, 1\)"),
        (np.ones((3, 1)), r"'x'.*\(3, 1\)"),
        ("abc", r"'x'.*sequence.*str"),
        ([0.0, "high", 1.0], r"'x'.*'high' for sample 1"),
        ([0.0, 1.0, [1.0]], r"'x'.*sample 2"),
        ([0.0, math.inf, 1.0], r"'x'.*inf for sample 1"),
        (torch.tensor([0.0, 1.0, -math.inf]), r"'x'.*-inf for sample 2"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_scores_of_a_wrong_form_always_raise(value: Any, message: str, on_error: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RewardSet({"ok": returns([0.0] * 3), "x": returns(value)}, on_error=on_error)(IMAGES, PROMPTS)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_reward_raises_with_its_name_and_batch(workers: int) -> None:
    rewards = RewardSet({"ok": returns([0.0] * 3), "broken": fails}, workers=workers)
    with pytest.raises(RewardError, match=r"'broken' raised ZeroDivisionError: engine broke, on batch 0 .*'a'") as info:
        rewards(IMAGES, PROMPTS)
    assert (info.value.reward, info.value.batch) == ("broken", 0)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert isinstance(info.value, GradBalanceError)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_reward_is_masked_and_counted(workers: int) -> None:
    rewards = RewardSet({"broken": fails, "ok": returns([1.0] * 3)}, on_error="mask", workers=workers)
    with pytest.warns(RuntimeWarning, match=r"'broken'.*masked"):
        table = rewards(IMAGES, PROMPTS)
    assert table.values[:, 0].isnan().all()
    assert table.mask.tolist() == [[False, True]] * 3
    assert table.errors == {"broken": 3, "ok": 0}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_is_told_on_the_next_batch(workers: int) -> None:
    rewards = RewardSet({"late": fails, "ok": returns([0.0] * 3)}, workers=workers)
    first = rewards.submit(IMAGES, PROMPTS)
    while not all(future.done() for future in first._futures.values()):
        time.sleep(0.001)
    with pytest.raises(RewardError, match=r"'late' .*on batch 0 "):
        rewards.submit(IMAGES, PROMPTS)
    with pytest.raises(RewardError, match=r"'late' .*on batch 0 "):
        first.result()


@pytest.mark.parametrize("workers", [0, 2])
def test_policies_by_name(workers: int) -> None:
    rewards = RewardSet({"remote": fails, "ok": returns([1.0] * 3)}, on_error={"remote": "mask"}, workers=workers)
    assert rewards.on_error == {"remote": "mask", "ok": "raise"}
    with pytest.warns(RuntimeWarning, match=r"'remote'.*masked"):
        assert rewards(IMAGES, PROMPTS).errors == {"remote": 3, "ok": 0}
    strict = RewardSet({"remote": fails, "ok": fails}, on_error={"remote": "mask"}, workers=workers)
    with pytest.warns(RuntimeWarning, match="'remote'"), pytest.raises(RewardError, match="'ok'"):
        strict(IMAGES, PROMPTS)


@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_lost_scores_are_masked_and_counted(on_error: Any) -> None:
    value = [0.5, LostScore("server away"), None]
    rewards = RewardSet({"remote": returns(value), "ok": returns([1.0] * 3)}, on_error=on_error)
    with pytest.warns(
        RuntimeWarning, match=r"'remote' lost the scores of 1 .*sample 1 with the prompt 'b': server away"
    ):
        table = rewards(IMAGES, PROMPTS)
    assert table.mask[:, 0].tolist() == [True, False, False]
    assert table.errors == {"remote": 1, "ok": 0}
    assert table.lost.tolist() == [[False, False], [True, False], [False, False]]
    assert table.counts() == {"remote": 1, "ok": 3}


def test_a_lost_score_is_a_missing_number() -> None:
    lost = pickle.loads(pickle.dumps(LostScore("server away")))
    assert math.isnan(lost)
    assert lost.reason == "server away"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_reward_that_ends_its_thread_is_reported(error: BaseException) -> None:
    def dies(images: Tensor, prompts: list[str]) -> list[float]:
        if prompts[0] == "die":
            raise error
        return [1.0]

    rewards = RewardSet({"dies": dies}, on_error="mask", workers=1)
    handles = [rewards.submit(IMAGES[:1], [prompt]) for prompt in ("a", "die", "b")]
    assert handles[0].result().errors == {"dies": 0}
    with pytest.warns(RuntimeWarning, match=f"'dies' raised RuntimeError: {type(error).__name__}"):
        assert handles[1].result().errors == {"dies": 1}
    assert handles[2].result().values.item() == 1.0


def test_a_slow_reward_keeps_its_order_and_the_others_their_pace() -> None:
    go = threading.Event()

    def slow(images: Tensor, prompts: list[str]) -> list[float]:
        assert go.wait(30)
        return [float(prompt) for prompt in prompts]

    rewards = RewardSet({"slow": slow, "fast": returns([7.0])}, workers=2)
    handles = [rewards.submit(IMAGES[:1], [str(i)]) for i in range(3)]
    assert [handle._futures["fast"].result(30) for handle in handles] == [[7.0]] * 3  # while `slow` still waits
    assert not any(handle._futures["slow"].done() for handle in handles)
    go.set()
    assert [handle.result().values.tolist() for handle in handles] == [[[float(i), 7.0]] for i in range(3)]


def test_scoring_runs_beside_the_caller_and_keeps_the_order() -> None:
    go = threading.Event()

    def slow(images: Tensor, prompts: list[str]) -> list[float]:
        assert go.wait(30)
        return [float(prompt) for prompt in prompts]

    rewards = RewardSet({"slow": slow, "fast": returns([0.0])}, workers=2)
    handles = [rewards.submit(IMAGES[:1], [str(i)]) for i in range(5)]  # returns although `slow` waits
    go.set()
    assert [handle.result().values[0, 0].item() for handle in reversed(handles)] == [4, 3, 2, 1, 0]
    assert handles[0].result() is handles[0].result()


def test_a_reward_is_called_by_one_thread_only() -> None:
    threads: dict[str, set[int]] = {name: set() for name in "abc"}

    def reward(name: str) -> Callable[..., list[float]]:
        def call(images: Tensor, prompts: list[str]) -> list[float]:
            threads[name].add(threading.get_ident())
            return [0.0] * len(prompts)

        return call

    rewards = RewardSet({name: reward(name) for name in "abc"}, workers=2)
    for handle in [rewards.submit(IMAGES, PROMPTS) for _ in range(10)]:
        handle.result()
    assert all(len(found) == 1 for found in threads.values())
    assert len(set.union(*threads.values())) == 2
    assert threading.get_ident() not in set.union(*threads.values())


@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_timeout(on_error: Any) -> None:
    release = threading.Event()
    hang: dict[str, Callable[..., Any]] = {
        "hang": lambda images, prompts: [float(release.wait(30))] * 3,
        "ok": returns([1.0] * 3),
    }
    rewards = RewardSet(hang, on_error=on_error, workers=2, timeout=0.05)
    handle = rewards.submit(IMAGES, PROMPTS)
    try:
        if on_error == "raise":
            with pytest.raises(RewardError, match=r"'hang' gave no result within the timeout of 0.05 s"):
                handle.result()
        else:
            with pytest.warns(RuntimeWarning, match=r"'hang'.*timeout"):
                table = handle.result()
            assert table.mask.tolist() == [[False, True]] * 3
            assert table.errors == {"hang": 3, "ok": 0}
    finally:
        release.set()


def test_a_timeout_error_of_the_reward_itself_is_reported_as_raised() -> None:
    def remote(images: Tensor, prompts: list[str]) -> list[float]:
        raise TimeoutError("server is away")

    with pytest.raises(RewardError, match="raised TimeoutError: server is away"):
        RewardSet({"remote": remote}, workers=1, timeout=30)(IMAGES, PROMPTS)


def test_a_hanging_reward_does_not_keep_the_program_alive() -> None:
    code = (
        "import threading, torch\n"
        "from gradbalance_diffusers.rewards import RewardSet\n"
        "RewardSet({'x': lambda i, p: threading.Event().wait()}, workers=1).submit(torch.zeros(1, 3, 2, 2), ['a'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IMAGES, PROMPTS[:2]), "2 prompts"),
        ((IMAGES, PROMPTS, [{}]), "1 metadata"),
        ((IMAGES[0], PROMPTS), "images"),
        ((IMAGES[:, :1], PROMPTS), "images"),
        (((IMAGES * 255).to(torch.uint8), PROMPTS), "uint8"),
        ((IMAGES[:0], []), "images"),
        ((IMAGES, PROMPTS, [{"prompts": 1}, {}, {}]), "prompts"),
        ((IMAGES, PROMPTS, [{1: 1}, {}, {}]), "strings"),
    ],
)
def test_bad_batches(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RewardSet([Brightness()]).submit(*arguments)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([], {}, "at least one"),
        ([Brightness(), Brightness()], {}, "distinct"),
        ([fails], {}, "attribute `name`"),
        ({"x": 3}, {}, "callables"),
        ([Brightness()], {"on_error": "ignore"}, "on_error.*ignore"),
        ([Brightness()], {"on_error": {"brightnes": "mask"}}, r"on_error.*'brightness'.*'brightnes'"),
        ([Brightness()], {"on_error": {"brightness": "drop"}}, "on_error.*drop"),
        ([Brightness()], {"workers": -1}, "workers"),
        ([Brightness()], {"timeout": 3.0}, "workers >= 1"),
        ([Brightness()], {"workers": 1, "timeout": 0.0}, "positive"),
    ],
)
def test_bad_sets(rewards: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RewardSet(rewards, **options)


class TestTable:
    def table(self) -> RewardTable:
        values = torch.tensor([[1.0, math.nan], [3.0, math.nan]], dtype=torch.float64)
        return RewardTable(("x", "y"), values, ~values.isnan(), torch.tensor([[False, True], [False, True]]))

    def test_select(self) -> None:
        chosen = self.table().select(["y"])
        assert chosen.names == ("y",)
        assert chosen.mask.tolist() == [[False], [False]]
        assert chosen.errors == {"y": 2}
        assert chosen.lost.all()
        assert self.table().select(["y", "x"]).values[:, 1].tolist() == [1.0, 3.0]
        with pytest.raises(InvalidArgumentError, match="'z'"):
            self.table().select(["z"])

    def test_means_are_over_defined_samples(self) -> None:
        means = self.table().means()
        assert means["x"] == 2.0
        assert math.isnan(means["y"])

    def test_concatenate(self) -> None:
        both = RewardTable.concatenate([self.table(), self.table()])
        assert len(both) == 4
        assert both.values[:, 0].tolist() == [1.0, 3.0, 1.0, 3.0]
        assert both.errors == {"x": 0, "y": 4}
        with pytest.raises(InvalidArgumentError, match="same rewards"):
            RewardTable.concatenate([self.table(), self.table().select(["x"])])
        with pytest.raises(InvalidArgumentError, match="same rewards"):
            RewardTable.concatenate([])


def test_no_warning_without_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RewardSet([Brightness()], on_error="mask", workers=1)(IMAGES, PROMPTS)
