from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradbalance as gb
from gradbalance.conflict_meter import ConflictMeter, Pair

MEANS = torch.tensor([[1.0, 0.0, 0.0], [-0.6, 0.8, 0.0], [0.3, 0.0, 0.9]], dtype=torch.float64)
NAMES = ["a", "b", "c"]
TRUE = gb.cosines(MEANS @ MEANS.T)


def batches(
    count: int, *, columns: int = 30, noise: float = 1.0, shared: float = 0.0, seed: int = 0
) -> list[torch.Tensor]:
    """Rows with expectation MEANS (padded with zeros), own noise, and noise that the objectives share."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.cat([MEANS, torch.zeros(3, columns - 3, dtype=torch.float64)], dim=1)
    found = []
    for _ in range(count):
        own = torch.randn(3, columns, generator=generator, dtype=torch.float64)
        common = torch.randn(1, columns, generator=generator, dtype=torch.float64)
        found.append(means + noise * own + shared * common)
    return found


def metered(rows: list[torch.Tensor], groups: int = 16) -> ConflictMeter:
    meter = ConflictMeter(groups=groups)
    for one in rows:
        meter.update(one, NAMES)
    return meter


def slow_cosines(rows: list[torch.Tensor]) -> torch.Tensor:
    """Every pair of different batches, one by one. Zero rows are absent."""
    count = len(rows[0])
    total, pairs = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    for b, one in enumerate(rows):
        for c, other in enumerate(rows):
            if b == c:
                continue
            for i in range(count):
                for j in range(count):
                    if one[i].any() and other[j].any():
                        total[i, j] += one[i] @ other[j]
                        pairs[i, j] += 1
    mean = total / pairs
    length = torch.where(mean.diagonal() > 0, mean.diagonal(), torch.nan).sqrt()
    return mean / length[:, None] / length


def slow_errors(rows: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Delete-a-group jackknife by pseudo-values (Busing et al. 1999), each estimate made anew."""
    used = min(groups, len(rows))
    full, values, factors = slow_cosines(rows), [], []
    for group in range(used):
        kept = [one for b, one in enumerate(rows) if b % groups != group]
        factors.append(len(rows) / (len(rows) - len(kept)))
        values.append(slow_cosines(kept))
    center = used * full - sum((1 - 1 / h) * value for h, value in zip(factors, values, strict=True))
    spread = [(h * full - (h - 1) * v - center) ** 2 / (h - 1) for h, v in zip(factors, values, strict=True)]
    return (sum(spread) / used).sqrt().fill_diagonal_(0)


@settings(max_examples=20)
@given(st.integers(3, 13), st.integers(3, 6), st.integers(0, 1000), st.booleans())
def test_against_all_pairs_of_batches(count: int, groups: int, seed: int, some_absent: bool) -> None:
    rows = batches(count, columns=5, noise=0.3, seed=seed)
    if some_absent:
        rows[0][1] = 0.0
        rows[-1][2] = 0.0
    meter = metered(rows, groups)
    torch.testing.assert_close(meter.cosines(), slow_cosines(rows), rtol=1e-9, atol=1e-9, equal_nan=True)
    if count > 3:
        torch.testing.assert_close(meter.errors(), slow_errors(rows, groups), rtol=1e-6, atol=1e-7, equal_nan=True)


def test_equal_groups_give_the_textbook_jackknife() -> None:
    rows = batches(24, noise=0.3)
    left_out = torch.stack([slow_cosines([r for b, r in enumerate(rows) if b % 8 != g]) for g in range(8)])
    textbook = (7 / 8 * ((left_out - left_out.mean(0)) ** 2).sum(0)).sqrt()
    torch.testing.assert_close(metered(rows, 8).errors(), textbook.fill_diagonal_(0), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("noise", "shared"), [(1.0, 0.0), (0.5, 1.0)], ids=["own noise", "shared noise"])
def test_no_bias_where_one_batch_is_biased(noise: float, shared: float) -> None:
    """Mean over 60 meters of 60 batches: within 4 of its own standard errors; one batch is far off."""
    found = torch.stack([metered(batches(60, noise=noise, shared=shared, seed=s)).cosines() for s in range(60)])
    error = found.std(0) / math.sqrt(60)
    off = (found.mean(0) - TRUE).abs()
    assert (off <= 4 * error + 0.01).all()
    naive = metered(batches(60, noise=noise, shared=shared)).in_batch()
    # One's own noise draws -0.6 to about 0; shared noise makes it positive.
    assert naive[0, 1] > (0.3 if shared else -0.1)


def test_mean_products_are_unbiased_exactly() -> None:
    """All 3^3 equally likely triples of batches: the mean of U is mu mu' to rounding."""
    choices = batches(3, columns=4, noise=2.0)
    mean = sum(choices) / 3
    total = torch.zeros(3, 3, dtype=torch.float64)
    for first in choices:
        for second in choices:
            for third in choices:
                meter = metered([first, second, third], groups=3)
                summed = meter._sums[0].sum(0)
                total += (summed @ summed.T - meter._products.sum(0)) / 6
    torch.testing.assert_close(total / 27, mean @ mean.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [48, 200])
def test_standard_errors_cover(count: int) -> None:
    """|estimate - truth| <= 2 errors in about 95 % of cases (Student's t with 15 degrees: 93.6 %)."""
    inside = []
    for seed in range(150):
        meter = metered(batches(count, columns=20, noise=0.6, seed=seed))
        off = (meter.cosines() - TRUE).abs() <= 2 * meter.errors()
        inside += [off[0, 1].item(), off[0, 2].item(), off[1, 2].item()]
    assert 0.89 <= np.mean(inside) <= 0.98


def test_verdicts() -> None:
    meter = metered(batches(300, noise=0.5))
    assert [(p.first, p.second, p.verdict) for p in meter.pairs()] == [
        ("a", "b", "conflict"),
        ("b", "c", "conflict"),
        ("a", "c", "aligned"),
    ]
    early = metered(batches(4, noise=3.0))
    assert {p.verdict for p in early.pairs()} == {"not yet known"}
    # Quantiles of Student's t: 16 groups know their error better than 4.
    for pair, quantile in [*((p, 2.1314) for p in meter.pairs()), *((p, 3.1824) for p in early.pairs())]:
        known = abs(pair.cosine) > quantile * pair.error
        assert pair.verdict == (("conflict" if pair.cosine < 0 else "aligned") if known else "not yet known")


@pytest.mark.parametrize("count", [3, 5, 16])
def test_one_unrelated_pair_in_twenty_gets_a_verdict_however_few_batches(count: int) -> None:
    generator, called = torch.Generator().manual_seed(count), 0
    for _ in range(150):
        meter = ConflictMeter()
        for _ in range(count):
            meter.update(torch.eye(4, 50) + 0.05 * torch.randn(4, 50, generator=generator), list("abcd"))
        called += sum(pair.verdict != "not yet known" for pair in meter.pairs())
    assert 0.02 < called / (150 * 6) < 0.08


def test_hidden_length_is_undefined_not_wrong() -> None:
    """Two batches with opposite rows: the squared length is estimated as negative."""
    meter = ConflictMeter()
    meter.update(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ["a", "b"])
    meter.update(torch.tensor([[-1.0, 0.0], [1.0, 1.0]]), ["a", "b"])
    assert math.isnan(meter.cosines()[0, 1])
    assert meter.pairs()[0].verdict == "not yet known"
    assert meter.cosines()[1, 1] == pytest.approx(1)


def test_absent_objectives_do_not_shrink_the_cosine() -> None:
    rows = batches(400, noise=0.3)
    for b, one in enumerate(rows):
        if b % 2:
            one[1] = 0.0
    assert metered(rows).cosines()[0, 1] == pytest.approx(-0.6, abs=0.05)
    never = [one.clone() for one in batches(20, noise=0.3)]
    for one in never:
        one[2] = 0.0
    assert metered(never).cosines()[0, 2].isnan()
    assert metered(never).cosines()[0, 1] == pytest.approx(-0.6, abs=0.2)


def test_blocks_dtypes_and_memory_of_the_argument() -> None:
    rows = batches(20, noise=0.4)
    blocked = ConflictMeter()
    for one in rows:
        given = [one[:, :10].float(), one[:, 10:].bfloat16()]
        blocked.update(given, NAMES)
        given[0].zero_()
    assert [block.dtype for block in blocked._sums] == [torch.float32, torch.float32]
    assert [block.shape for block in blocked._sums] == [(16, 3, 10), (16, 3, 20)]
    torch.testing.assert_close(blocked.cosines(), metered(rows).cosines(), rtol=0, atol=0.02)


def test_measure_agrees_with_autograd_and_leaves_grad_alone() -> None:
    layer = torch.nn.Linear(4, 3)
    other, direct = ConflictMeter(), ConflictMeter()
    for seed in range(5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        losses = {name: (layer(x)[:, k] ** 2).mean() for k, name in enumerate(NAMES)}
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)])
            for loss in losses.values()
        ]
        direct.update(torch.stack(rows), NAMES)
        other.measure(losses, layer.parameters())
    assert all(parameter.grad is None for parameter in layer.parameters())
    torch.testing.assert_close(other.cosines(), direct.cosines(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_state_round_trip() -> None:
    rows = batches(30, noise=0.5)
    whole, first, second = metered(rows), metered(rows[:11]), ConflictMeter()
    second.load_state_dict(first.state_dict())
    first.update(rows[11], NAMES)  # the copy does not share memory
    for one in rows[11:]:
        second.update(one, NAMES)
    assert torch.equal(second.cosines(), whole.cosines())
    assert torch.equal(second.errors(), whole.errors())
    with pytest.raises(gb.StateError, match="groups=16"):
        ConflictMeter(groups=4).load_state_dict(whole.state_dict())
    with pytest.raises(gb.StateError, match="keys"):
        whole.load_state_dict({})
    assert whole.batches == 30
    whole.reset()
    assert whole.batches == 0
    assert "at least 2" in str(whole)


def test_table_and_plot(tmp_path: Path) -> None:
    meter = metered(batches(300, noise=0.5))
    lines = str(meter).splitlines()
    assert "300 batches" in lines[0]
    assert lines[1].startswith("a  b  -0.")
    assert lines[1].endswith("conflict")
    assert len(lines) == 4
    pytest.importorskip("matplotlib")
    meter.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_refused_and_loses_nothing() -> None:
    meter = metered(batches(10))
    before = meter.cosines()
    with pytest.raises(gb.InvalidArgumentError, match="as before"):
        meter.update(batches(1)[0], ["a", "b", "x"])
    with pytest.raises(gb.InvalidArgumentError, match="distinct"):
        meter.update(batches(1)[0], ["a", "a", "b"])
    with pytest.raises(gb.InvalidArgumentError, match="shapes"):
        meter.update(torch.ones(3, 7), NAMES)
    with pytest.raises(gb.NonFiniteError, match="'b'") as caught:
        meter.update(torch.tensor([[1.0], [float("nan")], [1.0]]).expand(3, 30), NAMES)
    assert caught.value.objectives == ("b",)
    assert meter.batches == 10
    torch.testing.assert_close(meter.cosines(), before, rtol=0, atol=0, equal_nan=True)
    for groups in (2, 2.5, True):
        with pytest.raises(gb.InvalidArgumentError, match="groups"):
            ConflictMeter(groups=groups)  # type: ignore[arg-type]
    with pytest.raises(gb.StateError, match="at least 2"):
        ConflictMeter().cosines()


def test_errors_need_three_batches() -> None:
    meter = metered(batches(2, noise=0.01))
    assert meter.errors()[0, 1].isnan()
    assert meter.pairs()[0] == Pair("a", "b", *[pytest.approx(v, nan_ok=True) for v in _values(meter)], "not yet known")


def _values(meter: ConflictMeter) -> tuple[float, float, float]:
    return meter.cosines()[0, 1].item(), math.nan, meter.in_batch()[0, 1].item()


def test_what_is_read_in_between_changes_nothing() -> None:
    rows = batches(9)
    read, silent = ConflictMeter(groups=3), metered(rows, groups=3)
    for one in rows:
        read.update(one, NAMES)
        if read.batches > 1:
            read.cosines().zero_()
            read.table()
    torch.testing.assert_close(read.cosines(), silent.cosines(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(read.errors(), silent.errors(), rtol=0, atol=0, equal_nan=True)
    read.load_state_dict(metered(rows[:4], groups=3).state_dict())
    expected = metered(rows[:4], groups=3).cosines()
    torch.testing.assert_close(read.cosines(), expected, rtol=0, atol=0, equal_nan=True)
