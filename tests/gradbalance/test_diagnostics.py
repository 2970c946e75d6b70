"""Log dicts and conflict counts."""

import json
import math

import pytest
import torch
from torch import nn

from gradbalance import (
    MARBLE,
    BalanceInfo,
    ConflictRate,
    InvalidArgumentError,
    StateError,
    backward,
    summary,
)


def step(rows: list[list[float]], balancer: object = None) -> BalanceInfo:
    weight = nn.Parameter(torch.zeros(len(rows[0])))
    losses = {f"loss{k}": (weight * torch.tensor(row)).sum() for k, row in enumerate(rows)}
    return backward(losses, [weight], balancer or MARBLE())  # type: ignore[arg-type]


def test_summary_of_a_conflict() -> None:
    logged = summary(step([[1.0, 0.0], [-1.0, 1.0]]))
    assert logged["conflict"] is True
    assert logged["worst_pair_cosine"] == pytest.approx(-math.sqrt(0.5))
    assert logged["worst_cosine"] == pytest.approx(logged["mean_cosine"]) == pytest.approx(math.cos(3 * math.pi / 8))
    assert logged["norm/loss1"] == pytest.approx(math.sqrt(2))
    assert logged["coefficient/loss0"] == pytest.approx(0.5)
    assert logged["collector"] == "passes"
    json.dumps(logged)


def test_summary_leaves_zero_rows_out() -> None:
    logged = summary(step([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    assert logged["inactive"] == 1
    assert logged["conflict"] is False
    assert logged["worst_cosine"] > 0.9  # type: ignore[operator]


def test_summary_of_a_cached_step_and_of_one_objective() -> None:
    balancer = MARBLE(interval=2)
    step([[1.0], [2.0]], balancer)
    logged = summary(step([[1.0], [2.0]], balancer))
    assert logged["refreshed"] is False
    assert "worst_cosine" not in logged
    assert "conflict" not in summary(step([[1.0]]))


def test_conflict_rate_counts_pairs_and_survives_json() -> None:
    rate = ConflictRate()
    assert math.isnan(rate.overall())
    rate.update(step([[1.0, 0.0], [-1.0, 1.0], [0.0, 1.0]]))
    rate.update(step([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    other = ConflictRate()
    other.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    for counted in (rate, other):
        assert counted.steps.tolist() == [[0, 2, 1], [2, 0, 1], [1, 1, 0]]
        assert counted.rate()[0, 1].item() == 0.5
        assert counted.rate()[1, 2].item() == 0
        assert counted.rate()[0, 0].isnan()
        assert counted.overall() == 0.25
    empty = ConflictRate()
    empty.load_state_dict(ConflictRate().state_dict())
    assert empty.names is None


def test_conflict_rate_refuses_other_objectives_and_states() -> None:
    rate = ConflictRate()
    rate.update(step([[1.0], [2.0]]))
    with pytest.raises(InvalidArgumentError, match="loss0"):
        rate.update(step([[1.0], [2.0], [3.0]]))
    with pytest.raises(StateError, match="names, conflicts, steps"):
        rate.load_state_dict({"names": None})
