from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.old_policy import OldPolicySchedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (OldPolicySchedule("on_policy"), {0: 0.0, 10: 0.0, 10_000: 0.0}),
        (OldPolicySchedule("constant", decay=0.3), {0: 0.3, 10: 0.3, 10_000: 0.3}),
        (OldPolicySchedule.diffusion_nft(), {0: 0.0, 1: 0.001, 499: 0.499, 500: 0.5, 5000: 0.5}),
        (OldPolicySchedule.diffusion_nft_ocr(), {0: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 200: 0.9375, 1000: 0.999}),
        (OldPolicySchedule.marble(), {0: 0.0, 500: 0.5, 949: 0.949, 960: 0.95}),
    ],
)
def test_known_values(schedule: OldPolicySchedule, expected: dict[int, float]) -> None:
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)


def test_asking_changes_nothing() -> None:
    schedule = OldPolicySchedule.marble()
    forwards = [schedule(step) for step in range(50)]
    assert [schedule(step) for step in reversed(range(50))] == forwards[::-1]
    with pytest.raises(FrozenInstanceError):
        schedule.cap = 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "cosine"}, "mode"),
        ({"decay": 1.5}, "decay"),
        ({"cap": -0.1}, "cap"),
        ({"slope": -1.0}, "slope"),
        ({"start": -1}, "start"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        OldPolicySchedule(**arguments)


def test_negative_step() -> None:
    with pytest.raises(InvalidArgumentError, match="step"):
        OldPolicySchedule()(-1)
