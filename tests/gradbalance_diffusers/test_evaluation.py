from __future__ import annotations

import json
import math

import pytest
import torch

from gradbalance import InvalidArgumentError
from gradbalance_diffusers.evaluation import Evaluation, mean_and_error
from gradbalance_diffusers.prompts import Prompt


def evaluation(values: list[list[float]], epoch: int = 0) -> Evaluation:
    table = torch.tensor(values, dtype=torch.float64)
    prompts = [Prompt(f"prompt {i}", "general", {}) for i in range(len(values))]
    return Evaluation(epoch, ("a", "b"), prompts, table, ~table.isnan())


def test_mean_and_error_by_hand() -> None:
    result = mean_and_error(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64))
    assert result["mean"] == 3.0
    assert result["se"] == pytest.approx(math.sqrt(((4 + 1 + 9) / 2) / 3))
    assert mean_and_error(torch.tensor([])) == {"mean": None, "se": None, "n": 0}
    assert mean_and_error(torch.tensor([2.0]))["se"] is None


def test_paired_change_uses_only_prompts_that_both_score() -> None:
    base = evaluation([[1.0, 0.0], [2.0, math.nan], [3.0, 1.0]])
    later = evaluation([[1.5, 0.5], [2.5, 1.0], [3.5, math.nan]], epoch=4)
    change = later.change_from(base)
    assert change["a"] == {"mean": 0.5, "se": 0.0, "n": 3}
    assert change["b"]["mean"] == 0.5
    assert change["b"]["n"] == 1


def test_other_prompts_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="same prompts"):
        evaluation([[1.0, 1.0]]).change_from(evaluation([[1.0, 1.0], [2.0, 2.0]]))


def test_json_round_trip_is_exact() -> None:
    first = evaluation([[0.1 + 0.2, math.nan], [1 / 3, 2.0]])
    again = Evaluation.from_json(json.loads(json.dumps(first.as_json(grid=[0]))))
    assert torch.equal(first.values[first.mask], again.values[again.mask])
    assert torch.equal(first.mask, again.mask)
    assert first.summary() == again.summary()
