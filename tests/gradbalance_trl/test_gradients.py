"""The gradient that the optimizer gets is the one made of TRL's own losses, reward by reward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

LOSSES = ["dapo", "grpo", "bnpo", "dr_grpo", "cispo"]
# Off-policy: the second iteration on the same completions follows a large step, so that ratios leave the clip range.
POLICIES = {"on": {}, "off": {"num_iterations": 2, "max_steps": 4, "learning_rate": 3e-2}}
EVERY = list(product(LOSSES, ["on", "off"], [False, True], [1, 3]))
# Every loss on and off policy, every pair of the other choices, at a quarter of the time.
SOME = [case for place, case in enumerate(EVERY) if (place + place // 4) % 4 == 0]


def check(make: Callable[..., Any], cls: type, loss: str, policy: str, lora: bool, accumulation: int) -> None:
    trainer = make(
        cls,
        lora=lora,
        loss_type=loss,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=8 if accumulation == 1 else 4,
        **POLICIES[policy],
    )
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert trainer.refreshed == [True, False, True, False][: trainer.args.max_steps]
    assert trainer.balance_info.collector == ("linear" if lora else "passes")


@pytest.mark.parametrize(("loss", "policy", "lora", "accumulation"), SOME)
def test_equals_the_reference(make_trainer, reference_trainer, loss, policy, lora, accumulation) -> None:
    check(make_trainer, reference_trainer, loss, policy, lora, accumulation)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "policy", "lora", "accumulation"), [case for case in EVERY if case not in SOME])
def test_equals_the_reference_in_every_combination(
    make_trainer, reference_trainer, loss, policy, lora, accumulation
) -> None:
    check(make_trainer, reference_trainer, loss, policy, lora, accumulation)
