from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance_diffusers.evaluating.statistics import clustered_mean, composite_z
from gradbalance_diffusers.evaluation import mean_and_error

NUMBERS = st.floats(-100, 100, width=32)


def test_by_hand() -> None:
    # Prompt a: 1, 2, 6; prompt b: 3. Mean 3; sums of deviations 0 and 0: all the spread is within a prompt.
    within = clustered_mean([1.0, 2.0, 6.0, 3.0], ["a", "a", "a", "b"])
    assert (within.mean, within.se, within.pictures, within.prompts) == (3.0, 0.0, 4, 2)
    # Deviations from 2 are -2, -1 | 3: SE² = 2/1 * (9 + 9) / 9 = 4.
    between = clustered_mean([0.0, 1.0, 5.0], ["a", "a", "b"])
    assert between.mean == 2.0
    assert between.se == pytest.approx(2.0)
    half = 12.706204736 * 2.0  # t quantile 0.975 with one degree of freedom
    assert (between.low, between.high) == pytest.approx((2.0 - half, 2.0 + half))


def test_too_few_values_have_no_error() -> None:
    assert clustered_mean([], []).mean is None
    one = clustered_mean([1.0, 2.0], ["a", "a"])
    assert (one.mean, one.se, one.low, one.high, one.prompts) == (1.5, None, None, None, 1)


@given(st.lists(NUMBERS, min_size=2, max_size=12))
def test_with_one_picture_a_prompt_it_is_the_plain_standard_error(values: list[float]) -> None:
    plain = mean_and_error(torch.tensor(values, dtype=torch.float64))
    estimate = clustered_mean(values, [f"prompt {i}" for i in range(len(values))])
    assert estimate.mean == pytest.approx(plain["mean"], abs=1e-9)
    assert estimate.se == pytest.approx(plain["se"], abs=1e-9)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_with_as_many_pictures_each_it_is_that_of_the_prompt_means(rows: list[tuple[float, ...]]) -> None:
    plain = mean_and_error(torch.tensor(rows, dtype=torch.float64).mean(dim=1))
    estimate = clustered_mean([v for row in rows for v in row], [str(i) for i, row in enumerate(rows) for _ in row])
    assert estimate.se == pytest.approx(plain["se"], abs=1e-9)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        values = rng.normal(size=(8, 1)) + rng.normal(size=(8, 3))  # eight prompts, dependent pictures, mean 0
        estimate = clustered_mean(values.ravel().tolist(), [str(i) for i in range(8) for _ in range(3)])
        covered += estimate.low <= 0.0 <= estimate.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_composite_by_hand() -> None:
    # x: mean 2, sd 1 -> -1, 0, 1; y: mean 0, sd sqrt(3) -> 2/sqrt3, -1/sqrt3, -1/sqrt3.
    means = {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 2.0, "y": -1.0}, "c": {"x": 3.0, "y": -1.0}}
    root = math.sqrt(3)
    assert composite_z(means) == pytest.approx({"a": (-1 + 2 / root) / 2, "b": -0.5 / root, "c": (1 - 1 / root) / 2})


def test_composite_of_two_models_only_counts_wins() -> None:
    means = {"a": {"x": 0.0, "y": 0.0, "z": 9.0}, "b": {"x": 0.001, "y": 50.0, "z": 8.0}}
    assert composite_z(means)["b"] == pytest.approx((2 - 1) / 3 / math.sqrt(2))


def test_composite_leaves_out_what_cannot_be_compared() -> None:
    assert composite_z({"a": {"x": 1.0}}) == {"a": None}
    assert composite_z({"a": {"x": 1.0, "y": None}, "b": {"x": 2.0, "y": 3.0}}) == composite_z(
        {"a": {"x": 1.0}, "b": {"x": 2.0}}
    )
    assert composite_z({"a": {"x": None}, "b": {"x": 2.0}}) == {"a": None, "b": None}
    assert composite_z({"a": {"x": 0.1 + 0.2}, "b": {"x": 0.3}}) == {"a": 0.0, "b": 0.0}  # equal but for rounding


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=6),
    st.tuples(st.floats(0.01, 100), st.floats(-10, 10)),
)
def test_composite_has_no_unit_sums_to_zero_and_is_bounded(
    rows: list[tuple[float, ...]], unit: tuple[float, float]
) -> None:
    rows = [tuple(round(value, 2) for value in row) for row in rows]
    scale, shift = unit
    own = composite_z({str(i): {"x": a, "y": b, "z": c} for i, (a, b, c) in enumerate(rows)})
    other = composite_z({str(i): {"x": a * scale + shift, "y": b, "z": c} for i, (a, b, c) in enumerate(rows)})
    assert other == pytest.approx(own, abs=1e-6)
    assert sum(own.values()) == pytest.approx(0.0, abs=1e-9)
    count = len(rows)
    assert all(abs(value) <= (count - 1) / math.sqrt(count) + 1e-9 for value in own.values())


def test_composite_orders_the_papers_main_table_as_the_paper_does() -> None:
    # arXiv 2605.06507, Table 1. Its own composites (-2.319, -0.255, 1.015, 0.184, 1.116) are taken over more models.
    metrics = ("GenEval", "OCR", "PickScore", "CLIPScore", "HPSv2.1", "Aesthetic", "ImgRwd", "UniRwd")
    table = {
        "no CFG": (0.24, 0.12, 20.51, 0.237, 0.204, 5.13, -0.58, 2.02),
        "CFG": (0.63, 0.59, 22.34, 0.285, 0.279, 5.36, 0.85, 3.03),
        "sequence": (0.94, 0.91, 23.80, 0.293, 0.331, 6.01, 1.49, 3.49),
        "weighted sum": (0.92, 0.91, 21.53, 0.267, 0.300, 6.15, 1.16, 3.04),
        "MARBLE": (0.94, 0.96, 22.83, 0.286, 0.355, 6.59, 1.53, 3.52),
    }
    values = composite_z({name: dict(zip(metrics, row, strict=True)) for name, row in table.items()})
    assert sorted(values, key=values.__getitem__) == ["no CFG", "CFG", "weighted sum", "sequence", "MARBLE"]
