from __future__ import annotations

import math

import pytest
import torch

import gradbalance as gb
from gradbalance_diffusers.balance import Observed, make_balancer, weighted_sum
from gradbalance_diffusers.config import BalanceConfig
from gradbalance_diffusers.rewards.table import RewardTable


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("marble", gb.MARBLE),
        ("mgda", gb.MGDA),
        ("mgda-raw", gb.MGDA),
        ("nash", gb.NashMTL),
        ("mean", Observed),
        ("weighted-sum", gb.Mean),
    ],
)
def test_methods(method: str, kind: type) -> None:
    assert type(make_balancer(BalanceConfig(method=method))) is kind


def test_nash_has_the_length_of_the_gradients_so_that_the_common_part_and_kl_keep_their_weight() -> None:
    rows = 0.01 * torch.eye(3, dtype=torch.float64)
    weights = make_balancer(BalanceConfig(method="nash"))(rows @ rows.T)
    assert (weights @ rows).norm() == pytest.approx(0.01)


def test_mgda_looks_at_directions_and_mgda_raw_at_lengths_too() -> None:
    gram = torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64))
    normalized, raw = (make_balancer(BalanceConfig(method=method))(gram) for method in ("mgda", "mgda-raw"))
    assert (normalized[0] / normalized[1]).item() == pytest.approx(10.0)
    assert (raw[0] / raw[1]).item() == pytest.approx(100.0)


def test_marble_takes_its_options() -> None:
    config = BalanceConfig(
        interval=7, ema_decay=0.25, amortize="coefficients", floor=0.1, uniform_after=9, shrinkage=0.2
    )
    marble = make_balancer(config)
    assert (marble.interval, marble.ema_decay, marble.amortize) == (7, 0.25, "coefficients")
    assert (marble.floor, marble.uniform_after, marble.shrinkage) == (0.1, 9, 0.2)


def test_weighted_sum_shares_out_the_weight_of_missing_rewards() -> None:
    values = torch.tensor([[1.0, 0.5, math.nan], [2.0, math.nan, math.nan], [math.nan] * 3], dtype=torch.float64)
    table = RewardTable(("a", "b", "c"), values, ~values.isnan())
    total, mask = weighted_sum(table, {"a": 1.0, "b": 3.0})
    assert total[0, 0].item() == pytest.approx((1.0 + 3 * 0.5) / 4)
    assert total[1, 0].item() == 2.0
    assert mask.flatten().tolist() == [True, True, False]


def test_weighted_sum_names_unknown_rewards() -> None:
    table = RewardTable(("a",), torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(gb.InvalidArgumentError, match="'typo'"):
        weighted_sum(table, {"typo": 1.0})
