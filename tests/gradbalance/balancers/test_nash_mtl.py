from __future__ import annotations

import json

import pytest
import torch

from gradbalance.balancers import NashMTL
from gradbalance.errors import InvalidArgumentError, NonFiniteError, StateError

OPPOSITE = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])


def diagonal(*squares: float) -> torch.Tensor:
    return torch.diag(torch.tensor(squares, dtype=torch.float64))


def test_weights_and_shares() -> None:
    balancer = NashMTL()
    rows = torch.randn(4, 30, dtype=torch.float64) * torch.tensor([[1e3], [1.0], [1e-3], [10.0]])
    weights = balancer(rows @ rows.T)
    torch.testing.assert_close(weights * (rows @ rows.T @ weights), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close((weights @ rows).square().sum(), torch.tensor(4.0, dtype=torch.float64))
    lengths = weights * rows.norm(dim=1)
    torch.testing.assert_close(balancer.coefficients, lengths / lengths.sum())
    assert balancer.failures == 0


def test_rescaled_it_is_the_same_direction_with_the_mean_norm_of_the_rows() -> None:
    rows = torch.randn(4, 30, dtype=torch.float64) * torch.tensor([[1e3], [1.0], [0.0], [10.0]])
    plain, balancer = NashMTL()(rows @ rows.T), NashMTL(rescale=True)
    weights = balancer(rows @ rows.T)
    mean_norm = rows[[0, 1, 3]].norm(dim=1).mean()
    torch.testing.assert_close((weights @ rows).norm(), mean_norm)
    torch.testing.assert_close(weights @ rows / mean_norm, plain @ rows / 3**0.5)
    # Of gradients a thousandth as long the weights are the same, so the step is a thousandth as long.
    torch.testing.assert_close(balancer(1e-6 * rows @ rows.T), weights)
    torch.testing.assert_close(balancer.coefficients, plain * rows.norm(dim=1) / (plain * rows.norm(dim=1)).sum())


@pytest.mark.parametrize("interval", [1, 3])
def test_solves_on_every_interval_th_step(interval: int) -> None:
    balancer, refreshes = NashMTL(interval), []
    for step in range(7):
        if balancer.needs_rows:
            refreshes.append(step)
            balancer(diagonal(float(step + 1) ** 2, 1.0))
        assert balancer.weights.tolist() == pytest.approx([1 / (refreshes[-1] + 1), 1.0])
        balancer.step()
    assert refreshes == list(range(0, 7, interval))


def test_failure_keeps_the_last_good_weights_and_counts() -> None:
    balancer = NashMTL()
    good = balancer(diagonal(4.0, 1.0))
    assert torch.equal(balancer(OPPOSITE), good)
    assert balancer.failures == 1
    assert not balancer.solution.found
    assert balancer(diagonal(1.0, 1.0)).tolist() == [1.0, 1.0]
    assert balancer.failures == 1


def test_failure_before_any_solution_gives_finite_weights_until_one_exists() -> None:
    balancer = NashMTL()
    first = balancer(OPPOSITE)
    assert torch.isfinite(first).all()
    assert (first > 0).all()
    second = balancer(OPPOSITE * 4)
    torch.testing.assert_close(second, first / 2)
    good = balancer(diagonal(4.0, 1.0))
    assert good.tolist() == [0.5, 1.0]
    assert torch.equal(balancer(OPPOSITE), good)
    assert balancer.failures == 3


def test_zero_row_is_left_out_without_being_a_failure() -> None:
    balancer = NashMTL()
    assert balancer(diagonal(4.0, 0.0, 1.0)).tolist() == [0.5, 0.0, 1.0]
    assert balancer.coefficients.tolist() == [0.5, 0.0, 0.5]
    assert balancer.failures == 0
    assert balancer(diagonal(4.0, 16.0, 1.0)).tolist() == [0.5, 0.25, 1.0]


def test_all_zero_rows_give_zero_and_stay_due() -> None:
    balancer = NashMTL(interval=5)
    assert balancer(torch.zeros(2, 2)).tolist() == [0.0, 0.0]
    assert balancer.solution.reason == "all rows are zero"
    assert balancer.needs_rows
    with pytest.raises(StateError, match="before its first solve"):
        _ = balancer.weights


def test_non_finite_leaves_the_state_alone() -> None:
    balancer = NashMTL(interval=2)
    balancer(diagonal(4.0, 1.0))
    balancer.step()
    before = balancer.state_dict()
    with pytest.raises(NonFiniteError):
        balancer(diagonal(float("nan"), 1.0))
    assert balancer.state_dict() == before


def test_state_survives_json_in_mid_interval_and_continues_identically() -> None:
    original = NashMTL(interval=3)
    rows = torch.randn(3, 10, dtype=torch.float64)
    original(rows @ rows.T)
    original.step()
    restored = NashMTL(interval=3)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.state_dict() == original.state_dict()
    for _ in range(4):
        assert restored.needs_rows == original.needs_rows
        assert torch.equal(restored.weights, original.weights)
        assert torch.equal(restored.coefficients, original.coefficients)
        if original.needs_rows:
            assert torch.equal(restored(2 * rows @ rows.T), original(2 * rows @ rows.T))
        original.step()
        restored.step()


def test_fresh_state_round_trips() -> None:
    restored = NashMTL()
    restored.load_state_dict(json.loads(json.dumps(NashMTL().state_dict())))
    assert restored.needs_rows
    assert restored.coefficients is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balancer": "MARBLE"}, "MARBLE"),
        ({"extra": 1}, "unknown: \\['extra'\\]"),
        ({"age": -1}, "age"),
        ({"failures": 0.5}, "failures"),
        ({"weights": [1.0], "shares": [1.0]}, "K = 1"),
        ({"weights": [1.0, float("nan")]}, "weights"),
        ({"shares": None}, "shares"),
        ({"solved": "yes"}, "solved"),
        ({"weights": 3.0}, "weights"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_lose_nothing(change: dict[str, object], message: str) -> None:
    balancer = NashMTL()
    balancer(diagonal(4.0, 1.0))
    before = balancer.state_dict()
    with pytest.raises(StateError, match=message):
        balancer.load_state_dict({**before, **change})
    assert balancer.state_dict() == before


def test_missing_keys_are_named() -> None:
    state = NashMTL().state_dict()
    del state["age"]
    with pytest.raises(StateError, match="Missing: \\['age'\\]"):
        NashMTL().load_state_dict(state)


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "3"])
def test_bad_interval(interval: object) -> None:
    with pytest.raises(InvalidArgumentError, match="interval"):
        NashMTL(interval)  # type: ignore[arg-type]


def test_bad_rescale() -> None:
    with pytest.raises(InvalidArgumentError, match="rescale"):
        NashMTL(rescale="mean")  # type: ignore[arg-type]


def test_another_number_of_objectives_is_refused() -> None:
    balancer = NashMTL()
    balancer(diagonal(4.0, 1.0))
    with pytest.raises(InvalidArgumentError, match=r"K = 2 objectives.*K = 3"):
        balancer(diagonal(4.0, 1.0, 1.0))
