from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.balancers import MARBLE, MGDA
from gradbalance.errors import InvalidArgumentError, NonFiniteError, StateError
from gradbalance.solvers import min_norm

seeds = st.integers(0, 2**32 - 1)


def gram_of(rows: Any) -> torch.Tensor:
    rows = torch.as_tensor(rows, dtype=torch.float64)
    return rows @ rows.T


def diagonal(*norms: float) -> torch.Tensor:
    return torch.diag(torch.tensor(norms, dtype=torch.float64) ** 2)


# Three unit vectors; leaving out the third, alpha* = (1/2, 1/2); with it, the first two being equal, (1/4, 1/4, 1/2).
TWINS = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]


class SlowMARBLE:
    """The method from its definition, on rows in plain Python; the reference for everything but zero-row newcomers."""

    def __init__(
        self, interval: int, decay: float, amortize: str, floor: float, uniform_after: int | None, shrinkage: float
    ) -> None:
        self.interval, self.decay, self.amortize, self.floor = interval, decay, amortize, floor
        self.shrinkage = shrinkage
        self.uniform_after = uniform_after
        self.average: dict[int, float] = {}
        self.norm: dict[int, float] = {}
        self.mean = 0.0

    def direction(self, step: int, rows: torch.Tensor) -> torch.Tensor:
        uniform = self.uniform_after is not None and step >= self.uniform_after
        if step % self.interval == 0 and not (uniform and self.amortize == "coefficients" and self.norm):
            return self.refresh(uniform, rows)
        average = {k: 1 / len(self.norm) for k in self.norm} if uniform else self.average
        weight = {k: a * (self.mean / self.norm[k] if self.amortize == "direction" else 1) for k, a in average.items()}
        return sum((w * rows[k] for k, w in weight.items()), torch.zeros(rows.shape[1], dtype=torch.float64))

    def refresh(self, uniform: bool, rows: torch.Tensor) -> torch.Tensor:
        valid = [k for k in range(len(rows)) if float(rows[k].norm()) > 0]
        unit = {k: rows[k] / rows[k].norm() for k in valid}
        stacked = torch.stack([unit[k] for k in valid])
        solved = [1 / len(valid)] * len(valid) if uniform else min_norm(stacked @ stacked.T, self.floor).weights
        alpha = {k: (1 - self.shrinkage) * a + self.shrinkage / len(valid) for k, a in zip(valid, solved, strict=True)}
        if not uniform:
            taken = sum(a for k, a in alpha.items() if k not in self.norm)
            before = {k: (1 - taken) * a for k, a in self.average.items()}
            before |= {k: a for k, a in alpha.items() if k not in self.norm}
            self.average = {
                k: self.decay * before[k] + (1 - self.decay) * alpha.get(k, 0.0) for k in sorted({*before, *alpha})
            }
        self.norm |= {k: float(rows[k].norm()) for k in valid}
        self.mean = sum(float(rows[k].norm()) for k in valid) / len(valid)
        return self.mean * sum((alpha[k] * unit[k] for k in valid), torch.zeros(rows.shape[1], dtype=torch.float64))


@given(
    seeds,
    st.integers(1, 5),
    st.integers(1, 4),
    st.floats(0, 0.95),
    st.sampled_from(["direction", "coefficients"]),
    st.floats(0, 0.2),
    st.none() | st.integers(0, 8),
    st.sampled_from([0.0, 0.5]) | st.floats(0, 0.95),
)
def test_every_step_follows_the_definition(
    seed: int,
    count: int,
    interval: int,
    decay: float,
    amortize: Any,
    floor: float,
    uniform_after: int | None,
    shrinkage: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    fast = MARBLE(interval, decay, amortize, floor, uniform_after, shrinkage=shrinkage)
    slow = SlowMARBLE(interval, decay, amortize, floor, uniform_after, shrinkage)
    for step in range(10):
        rows = torch.randn(count, 12, generator=generator, dtype=torch.float64)
        rows *= 10 ** (4 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 2)
        # Some rows die now and then, also on the first refresh, but never all.
        rows[torch.rand(count, generator=generator) < 0.3] = 0.0
        rows[step % count] += 1.0
        weights = fast(rows @ rows.T) if fast.needs_rows else fast.weights
        torch.testing.assert_close(weights @ rows, slow.direction(step, rows), rtol=1e-6, atol=1e-8)
        assert fast.coefficients.sum() == pytest.approx(1, abs=1e-12)
        assert fast.coefficients.min() >= 0
        fast.step()


@pytest.mark.parametrize("interval", [1, 3, 10])
def test_refreshes_on_every_interval_th_step(interval: int) -> None:
    balancer, refreshes = MARBLE(interval), []
    for step in range(25):
        if balancer.needs_rows:
            refreshes.append(step)
            balancer(diagonal(1.0, 2.0))
        balancer.step()
    assert refreshes == list(range(0, 25, interval))


def test_refresh_uses_the_new_solution_and_other_steps_the_average() -> None:
    balancer = MARBLE(interval=2, ema_decay=0.5)
    # alpha* = 1/2 each; mean norm 2.
    assert balancer(diagonal(1.0, 3.0)).tolist() == pytest.approx([1.0, 1 / 3])
    balancer.step()
    balancer.step()
    # Unit rows (1, 0) and (0.8, 0.6): the first alone has alpha* = 1/2 each too, so lengthen the story with three rows.
    assert balancer.coefficients.tolist() == pytest.approx([0.5, 0.5])
    balancer = MARBLE(interval=2, ema_decay=0.7)
    assert balancer(gram_of(TWINS)).tolist() == pytest.approx([0.25, 0.25, 0.5])
    balancer.step()
    balancer.step()
    # Now all three are orthogonal, with norms 1, 2, 6 and mean 3: alpha* = 1/3 each.
    weights = balancer(diagonal(1.0, 2.0, 6.0))
    assert weights.tolist() == pytest.approx([1.0, 1 / 2, 1 / 6])
    assert balancer.coefficients.tolist() == pytest.approx([1 / 3] * 3)
    average = [0.7 * 0.25 + 0.3 / 3, 0.7 * 0.25 + 0.3 / 3, 0.7 * 0.5 + 0.3 / 3]
    assert balancer.weights.tolist() == pytest.approx([average[0] * 3, average[1] * 3 / 2, average[2] * 3 / 6])
    balancer.step()
    assert balancer.coefficients.tolist() == pytest.approx(average)


def test_published_form_caches_coefficients() -> None:
    balancer = MARBLE(amortize="coefficients")
    assert balancer(diagonal(1.0, 3.0)).tolist() == pytest.approx([1.0, 1 / 3])
    assert balancer.weights.tolist() == pytest.approx([0.5, 0.5])


def test_direction_form_reproduces_the_solved_direction() -> None:
    rows = torch.randn(5, 40, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [50.0], [1.0], [2.0]])
    balancer = MARBLE()
    refreshed = balancer(rows @ rows.T)
    torch.testing.assert_close(balancer.weights, refreshed)
    torch.testing.assert_close(refreshed, MGDA(normalize=True)(rows @ rows.T))


def test_floor_holds_over_valid_rows() -> None:
    balancer = MARBLE(floor=0.2)
    balancer(gram_of([[1.0, 0.0], [0.9, 0.1], [0.0, 0.0], [-0.5, 1.0]]))
    coefficients = balancer.coefficients
    assert coefficients[2] == 0
    assert coefficients[[0, 1, 3]].min() >= 0.2 - 1e-12


def test_shrinkage_brings_back_a_row_that_the_solve_left_out() -> None:
    rows = [[1.0, 0.0], [-0.6, 0.8], [0.7, 0.7], [0.0, 0.0]]
    plain, shrunk = MARBLE(), MARBLE(shrinkage=0.3)
    plain(gram_of(rows))
    shrunk(gram_of(rows))
    assert plain.coefficients[2] == 0
    equal = torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3
    torch.testing.assert_close(shrunk.coefficients, 0.7 * plain.coefficients + 0.3 * equal.double())
    shrunk.step()
    torch.testing.assert_close(shrunk.coefficients, 0.7 * plain.coefficients + 0.3 * equal.double())


def test_shrinkage_goes_towards_the_shares_of_priorities() -> None:
    plain, shrunk = MARBLE(preference=[3, 1]), MARBLE(preference=[3, 1], shrinkage=0.5)
    for balancer in (plain, shrunk):
        balancer(gram_of([[1.0, 0.0], [0.8, 0.6]]))
    torch.testing.assert_close(
        shrunk.coefficients, 0.5 * plain.coefficients + 0.5 * torch.tensor([0.75, 0.25], dtype=torch.float64)
    )


def test_dead_objective_is_left_out_and_kept_alive_by_the_average() -> None:
    balancer = MARBLE(interval=1, ema_decay=0.7)
    balancer(diagonal(1.0, 2.0))
    balancer.step()
    assert balancer(diagonal(4.0, 0.0)).tolist() == [1.0, 0.0]
    assert balancer.coefficients.tolist() == [1.0, 0.0]
    # Average (0.65, 0.35), mean norm 4 of the valid rows, and the dead row's norm from when it was valid.
    assert balancer.weights.tolist() == pytest.approx([0.65 * 4 / 4, 0.35 * 4 / 2])
    balancer.step()
    assert balancer(diagonal(4.0, 2.0)).tolist() == pytest.approx([0.5 * 3 / 4, 0.5 * 3 / 2])


def test_objective_first_valid_on_a_later_refresh_enters_with_its_own_solution() -> None:
    balancer = MARBLE(interval=1, ema_decay=0.7)
    balancer(gram_of([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
    assert balancer.weights.tolist() == pytest.approx([0.5, 0.5, 0.0])
    balancer.step()
    balancer(gram_of(TWINS))
    balancer.step()
    # Half of the simplex goes to the newcomer at once; the others keep their proportions.
    assert balancer.coefficients.tolist() == pytest.approx([0.25, 0.25, 0.5])


def test_all_zero_rows_change_nothing_and_stay_due() -> None:
    balancer = MARBLE(interval=1)
    assert balancer(torch.zeros(2, 2)).tolist() == [0.0, 0.0]
    assert balancer.solution.reason == "all rows are zero"
    assert not balancer.solution.found
    assert balancer.coefficients is None
    assert balancer.needs_rows
    balancer(diagonal(1.0, 2.0))
    balancer.step()
    before = balancer.state_dict()
    assert balancer(torch.zeros(2, 2)).tolist() == [0.0, 0.0]
    assert balancer.state_dict() == before
    assert balancer.needs_rows


def test_uniform_stage_in_the_direction_form_keeps_norms_fresh() -> None:
    balancer, refreshes = MARBLE(interval=3, uniform_after=4), []
    balancer(gram_of(TWINS))
    balancer.step()
    for step in range(1, 10):
        if balancer.needs_rows:
            refreshes.append(step)
            weights = balancer(gram_of(TWINS) * 4)
            expected = [1 / 4, 1 / 4, 1 / 2] if step < 4 else [1 / 3] * 3
            assert weights.tolist() == pytest.approx(expected)
        elif step < 4:
            assert balancer.weights.tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])
        else:
            assert balancer.weights.tolist() == pytest.approx([1 / 3] * 3)
        balancer.step()
    assert refreshes == [3, 6, 9]
    assert balancer.state_dict()["average"] == pytest.approx([0.25, 0.25, 0.5])


def test_uniform_stage_of_the_published_form_needs_no_rows() -> None:
    balancer = MARBLE(interval=2, uniform_after=1, amortize="coefficients")
    balancer(gram_of(TWINS))
    for _ in range(9):
        balancer.step()
        assert not balancer.needs_rows
        assert balancer.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_uniform_from_the_start_never_solves() -> None:
    balancer = MARBLE(uniform_after=0)
    assert balancer(diagonal(1.0, 3.0, 0.0)).tolist() == pytest.approx([0.5 * 2, 0.5 * 2 / 3, 0.0])
    assert balancer.solution is None
    assert balancer.weights.tolist() == pytest.approx([0.5 * 2, 0.5 * 2 / 3, 0.0])


def test_non_finite_leaves_the_state_alone_and_the_refresh_due() -> None:
    balancer = MARBLE(interval=1)
    balancer(diagonal(1.0, 2.0))
    balancer.step()
    before = balancer.state_dict()
    with pytest.raises(NonFiniteError) as caught:
        balancer(diagonal(1.0, float("inf")))
    assert caught.value.objectives == ("1",)
    assert balancer.state_dict() == before
    assert balancer.needs_rows


def test_weights_before_the_first_refresh() -> None:
    balancer = MARBLE()
    balancer.step()
    assert balancer.needs_rows
    with pytest.raises(StateError, match="before its first refresh"):
        _ = balancer.weights


def test_answers_are_copies() -> None:
    balancer = MARBLE()
    balancer(diagonal(1.0, 2.0)).zero_()
    balancer.weights.zero_()
    balancer.coefficients.zero_()
    assert balancer.weights.min() > 0
    assert balancer.coefficients.min() > 0
    state = balancer.state_dict()
    state["average"][0] = 7.0
    assert balancer.state_dict()["average"][0] == 0.5


@given(seeds, st.integers(0, 11), st.sampled_from(["direction", "coefficients"]), st.none() | st.integers(0, 10))
def test_state_survives_json_and_continues_bit_for_bit(
    seed: int, stop: int, amortize: Any, uniform_after: int | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grams = []
    for _ in range(24):
        rows = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        rows[torch.rand(4, generator=generator) < 0.2] = 0.0
        rows[0] += 1.0
        grams.append(rows @ rows.T)

    def advance(balancer: MARBLE, begin: int, end: int) -> list[torch.Tensor]:
        seen = []
        for gram in grams[begin:end]:
            seen += [balancer(gram) if balancer.needs_rows else balancer.weights, balancer.coefficients]
            balancer.step()
        return seen

    unbroken = MARBLE(3, 0.7, amortize, 0.01, uniform_after)
    advance(unbroken, 0, stop)
    resumed = MARBLE(3, 0.7, amortize, 0.01, uniform_after)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    assert resumed.state_dict() == unbroken.state_dict()
    for one, other in zip(advance(unbroken, stop, 24), advance(resumed, stop, 24), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balancer": "NashMTL"}, "NashMTL"),
        ({"surprise": 1}, "unknown: \\['surprise'\\]"),
        ({"norms": [1.0, 2.0, 3.0]}, "K = 3"),
        ({"average": [1.0]}, "average"),
        ({"average": [0.5, float("nan")]}, "average"),
        ({"norms": 1.0}, "norms"),
        ({"norms": [1.0, -2.0]}, "norms"),
        ({"norms": None}, "norms"),
        ({"age": None}, "age"),
        ({"steps": -1}, "steps"),
        ({"mean_norm": "big"}, "mean_norm"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_lose_nothing(change: dict[str, object], message: str) -> None:
    balancer = MARBLE()
    balancer(diagonal(1.0, 2.0))
    before = balancer.state_dict()
    with pytest.raises(StateError, match=message):
        balancer.load_state_dict({**before, **change})
    assert balancer.state_dict() == before


def test_missing_keys_are_named() -> None:
    state = MARBLE().state_dict()
    del state["steps"]
    with pytest.raises(StateError, match="Missing: \\['steps'\\]"):
        MARBLE().load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"interval": 0}, "interval"),
        ({"interval": 2.0}, "interval"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"ema_decay": -0.1}, "ema_decay"),
        ({"ema_decay": float("nan")}, "ema_decay"),
        ({"amortize": "Direction"}, "amortize"),
        ({"floor": 2.0}, "floor"),
        ({"shrinkage": 1.0}, "shrinkage"),
        ({"shrinkage": float("nan")}, "shrinkage"),
        ({"uniform_after": -1}, "uniform_after"),
        ({"uniform_after": 1.5}, "uniform_after"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"`{name}` should"):
        MARBLE(**arguments)


def test_another_number_of_objectives_is_refused() -> None:
    balancer = MARBLE()
    balancer(diagonal(1.0, 2.0))
    with pytest.raises(InvalidArgumentError, match=r"K = 2 objectives.*K = 3"):
        balancer(diagonal(1.0, 2.0, 3.0))


def test_row_norms_over_any_range_when_normalized() -> None:
    rows = torch.randn(6, 50, dtype=torch.float64)
    scales = torch.tensor([1e-100, 1e-30, 1.0, 1e3, 1e30, 1e100], dtype=torch.float64)
    one, other = MARBLE(), MARBLE()
    one(rows @ rows.T)
    other((rows @ rows.T) * scales[:, None] * scales)
    np.testing.assert_allclose(other.coefficients, one.coefficients, rtol=1e-9)
