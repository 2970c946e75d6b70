from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError, NonFiniteError
from gradbalance.solvers import Solution, min_norm
from gradbalance.solvers.hull import _share_ties, positive_definite, semidefinite

FAMILIES = [
    "normal",
    "ill-scaled",
    "few columns",
    "few columns, ill-scaled",
    "duplicates",
    "opposites",
    "opposites, ill-scaled",
    "near-stationary 64 x 40",
    "narrow cone",
    "rank one",
    "small integers",
    "around the origin",
]


def make_rows(family: str, seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, 200))
    scales = 10.0 ** rng.uniform(-12, 12, (count, 1))
    few = rng.standard_normal((count, max(1, count // 3)))
    if family == "ill-scaled":
        return rows * scales
    if family == "few columns":
        return few
    if family == "few columns, ill-scaled":
        return few * scales
    if family == "duplicates":
        return rows[rng.integers(0, count, count)] * 10.0 ** rng.uniform(-2, 2)
    if family.startswith("opposites"):
        rows[-1] = -rows[0]
        return rows * scales if family.endswith("ill-scaled") else rows
    if family == "near-stationary 64 x 40":
        return rng.standard_normal((64, 40)) + 0.2 * rng.uniform() * rng.standard_normal(40)
    if family == "narrow cone":
        return rng.standard_normal(200) + 10.0 ** rng.uniform(-8, 0) * rows
    if family == "rank one":
        return rng.standard_normal((count, 1)) * rng.standard_normal(50)
    if family == "small integers":
        return rng.integers(-2, 3, (count, 4)) + np.array([3.0, 0.0, 0.0, 0.0])
    if family == "around the origin":
        # 0 is at distance 10^-p from an affine subspace that holds all rows, inside the hull of their projections.
        flat = rng.standard_normal((count, max(1, count // 4)))
        flat -= rng.dirichlet(np.ones(count)) @ flat
        return np.hstack([flat, np.full((count, 1), 10.0 ** rng.uniform(-8, 0))])
    return rows


cases = st.tuples(st.sampled_from(FAMILIES), st.integers(0, 2**32 - 1), st.integers(2, 64))


def exact_gap(gram: np.ndarray, weights: np.ndarray, floor: float = 0.0) -> float:
    """Solution.gap from its definition, in the scale-free form and in extended precision where the platform has it."""
    weights = weights.astype(np.longdouble)
    norms = np.sqrt(gram.diagonal()).astype(np.longdouble)
    cosines = gram.astype(np.longdouble) / norms[:, None] / norms
    total = (weights * norms).sum()
    slopes = norms / total * (cosines @ (weights * norms / total))  # (G a)_k / B^2
    squared = (weights * slopes).sum()
    rest = 1 - len(gram) * floor
    simplex = (weights - floor) / rest
    return float((rest * ((simplex * slopes).sum() - slopes) / np.maximum(1, norms / total)).max() / max(squared, 1e-5))


def exact_square(rows: list[list[int]]) -> Fraction:
    """The smallest squared norm in the hull, in rational arithmetic: the best feasible point over all active sets."""
    gram = [[Fraction(sum(a * b for a, b in zip(u, v, strict=True))) for v in rows] for u in rows]
    best = min(gram[k][k] for k in range(len(rows)))
    for size in range(2, len(rows) + 1):
        for support in combinations(range(len(rows)), size):
            system = [[gram[i][j] for j in support] + [Fraction(1), Fraction(0)] for i in support]
            system.append([Fraction(1)] * size + [Fraction(0), Fraction(1)])
            solved = solve_exactly(system)
            if solved is None or min(solved[:size]) < 0:
                continue
            square = sum(solved[i] * solved[j] * gram[support[i]][support[j]] for i in range(size) for j in range(size))
            best = min(best, square)
    return best


def solve_exactly(system: list[list[Fraction]]) -> list[Fraction] | None:
    size = len(system)
    for column in range(size):
        pivot = next((row for row in range(column, size) if system[row][column] != 0), None)
        if pivot is None:
            return None  # affinely dependent rows: a smaller support has the same minimum
        system[column], system[pivot] = system[pivot], system[column]
        system[column] = [value / system[column][column] for value in system[column]]
        for row in range(size):
            if row != column and system[row][column] != 0:
                factor = system[row][column]
                system[row] = [a - factor * b for a, b in zip(system[row], system[column], strict=True)]
    return [row[-1] for row in system]


@given(cases)
def test_promise_on_hard_families(case: tuple[str, int, int]) -> None:
    rows = make_rows(*case)
    gram = rows @ rows.T
    solution = min_norm(gram)
    assert solution.found
    assert solution.is_optimal()
    assert solution.weights.min() >= 0
    assert abs(solution.weights.sum() - 1) <= 1e-12
    assert exact_gap(gram, solution.weights) <= 1e-9


@given(cases, st.floats(0, 1))
def test_promise_with_floor(case: tuple[str, int, int], share: float) -> None:
    rows = make_rows(*case)
    gram = rows @ rows.T
    floor = share * 0.999 / len(rows)
    solution = min_norm(gram, floor)
    assert solution.found
    assert solution.weights.min() >= floor
    assert abs(solution.weights.sum() - 1) <= 1e-12
    assert exact_gap(gram, solution.weights, floor) <= 1e-9


@given(
    st.integers(1, 3).flatmap(
        lambda d: st.lists(st.lists(st.integers(-5, 5), min_size=d, max_size=d), min_size=1, max_size=4)
    )
)
def test_objective_equals_rational_arithmetic(rows: list[list[int]]) -> None:
    gram = np.array(rows, dtype=float) @ np.array(rows, dtype=float).T
    weights = min_norm(gram).weights
    assert weights @ gram @ weights == pytest.approx(float(exact_square(rows)), rel=1e-9, abs=1e-12)


def test_rational_reference_finds_a_known_minimum() -> None:
    assert exact_square([[1, 0], [0, 2], [5, 5]]) == Fraction(4, 5)


@given(cases, st.floats(1e-12, 1e12), st.randoms(use_true_random=False))
def test_equivariant_to_scale_and_order(case: tuple[str, int, int], scale: float, random: object) -> None:
    rows = make_rows(*case)
    order = np.random.default_rng(random.getrandbits(32)).permutation(len(rows))  # type: ignore[attr-defined]
    gram = rows @ rows.T
    one, other = min_norm(gram).weights, min_norm(scale**2 * gram[np.ix_(order, order)]).weights
    lengths = np.linalg.norm(rows, axis=1)
    # The combination is unique; how well the gap determines it depends on the spread of the lengths.
    if not case[0].endswith(", ill-scaled"):
        assert np.linalg.norm((one[order] - other) @ rows[order]) <= 1e-6 * (one @ lengths)
    # Weights are unique where rows are independent.
    if case[0] in ("normal", "ill-scaled"):
        np.testing.assert_allclose(other, one[order], atol=1e-9)
    # Where they are not unique, the choice of least norm is: rounding moves it by 1e-16 over the proximal weight 1e-10.
    elif case[0] in ("duplicates", "rank one", "few columns"):
        np.testing.assert_allclose(other * lengths[order], one[order] * lengths[order], atol=1e-3 * (one @ lengths))


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 30), st.sampled_from(["large", "small"]))
def test_equal_rows_get_equal_weights(seed: int, count: int, columns: int, size: str) -> None:
    rng = np.random.default_rng(seed)
    distinct = rng.standard_normal((count, columns)) + (0.5 if size == "small" else 3)
    index = np.concatenate([np.arange(count), rng.integers(0, count, 5)])
    rng.shuffle(index)
    rows = distinct[index]
    weights = min_norm(rows @ rows.T).weights
    for k in range(count):
        assert np.ptp(weights[index == k]) <= 1e-12


def test_least_norm_choice_where_weights_are_not_unique() -> None:
    # Six rows on a circle around (0, 0, h): any balanced mixture of opposite rows gives the shortest vector.
    angles = np.array([0.0, np.pi, np.pi / 2, -np.pi / 2, np.pi / 4, -3 * np.pi / 4])
    rows = np.column_stack([np.cos(angles), np.sin(angles), np.full(6, 0.3)])
    solution = min_norm(rows @ rows.T)
    assert solution.method == "proximal quadprog"
    np.testing.assert_allclose(solution.weights, np.full(6, 1 / 6), atol=1e-6)


def test_equal_rows_of_many_columns() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 200_001))
    rows[3] = rows[0]
    weights = min_norm(rows @ rows.T).weights
    assert weights[0] == pytest.approx(weights[3], abs=1e-12)


@given(cases, st.floats(0, 1))
def test_quick_and_exact_paths_agree(case: tuple[str, int, int], share: float) -> None:
    rows = make_rows("normal", case[1], case[2])
    rows *= np.random.default_rng(case[1]).uniform(0.1, 10, (len(rows), 1))
    gram = rows @ rows.T
    lengths = np.sqrt(gram.diagonal())
    cosines, inverse = gram / np.outer(lengths, lengths), lengths.min() / lengths
    quick = positive_definite(cosines, inverse)
    assert quick is not None
    slow, _, _ = semidefinite(cosines, inverse, lambda t: exact_gap(gram, t), 1e-11)
    np.testing.assert_allclose(quick[0], slow, atol=1e-8)


def test_known_answers() -> None:
    np.testing.assert_allclose(min_norm([[4.0]]).weights, [1.0])
    np.testing.assert_allclose(min_norm([[1.0, 0.0], [0.0, 4.0]]).weights, [0.8, 0.2])
    np.testing.assert_allclose(min_norm([[1.0, 2.0], [2.0, 9.0]]).weights, [1.0, 0.0])
    np.testing.assert_allclose(min_norm(np.diag([1.0, 2.0, 4.0])).weights, np.array([4, 2, 1]) / 7)
    np.testing.assert_allclose(min_norm(np.ones((5, 5))).weights, np.full(5, 0.2))
    np.testing.assert_allclose(min_norm(np.diag([1.0, 2.0, 4.0]), floor=0.2).weights, [8 / 15, 4 / 15, 0.2])
    np.testing.assert_allclose(min_norm([[1.0, 0.0], [0.0, 99.0]], floor=0.25).weights, [0.75, 0.25])


@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        ([[1.0, 0.0], [-1.0, 0.0]], [0.5, 0.5]),
        ([[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], [1 / 3, 2 / 3, 0.0]),
        ([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], [1 / 3, 1 / 3, 1 / 3]),
        ([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [0.0, 1.0, 0.0]),
        ([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]], [0.5, 0.5, 0.0]),
        ([[0.0], [0.0]], [0.5, 0.5]),
        ([[0.0], [3.0]], [1.0, 0.0]),
        ([[0.0]], [1.0]),
    ],
)
def test_stationary_points_are_flagged(rows: list[list[float]], weights: list[float]) -> None:
    solution = min_norm(np.array(rows) @ np.array(rows).T)
    assert solution.stationary
    assert solution.found
    np.testing.assert_allclose(solution.weights, weights, atol=1e-6)


def test_ordinary_points_are_not_flagged() -> None:
    assert not min_norm(np.eye(5)).stationary
    assert not min_norm([[1.0, -0.999999], [-0.999999, 1.0]]).stationary


def test_zero_row_with_floor_leaves_weight_to_rows_that_cancel() -> None:
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    solution = min_norm(rows @ rows.T, floor=0.2)
    assert solution.stationary
    np.testing.assert_allclose(solution.weights, [0.2, 0.4, 0.2, 0.2], atol=1e-9)


def test_floor_is_sharp_where_the_free_answer_is_lower() -> None:
    rows = np.diag([1.0, 10.0, 10.0])
    solution = min_norm(rows @ rows.T, floor=0.1)
    np.testing.assert_allclose(solution.weights, [0.8, 0.1, 0.1])


@pytest.mark.parametrize("floor", [1 / 3, float(np.float32(1 / 3)), 0.3333333333333334])
def test_floor_of_one_over_k_is_uniform(floor: float) -> None:
    np.testing.assert_allclose(min_norm(np.diag([1.0, 2.0, 3.0]), floor).weights, np.full(3, 1 / 3), rtol=1e-15)


@pytest.mark.parametrize("floor", [-0.1, 0.4, float("nan"), float("inf")])
def test_impossible_floor_is_refused_with_its_sum(floor: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"floor.*bounds sum to"):
        min_norm(np.eye(3), floor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    solution = min_norm((rows @ rows.T).to(dtype))
    np.testing.assert_allclose(solution.weights, min_norm(rows @ rows.T).weights, atol=2e-2)
    assert solution.weights.sum() == pytest.approx(1, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(3, 30), st.integers(1, 40))
def test_float32_gramians_are_answered_and_repairs_are_told(seed: int, count: int, columns: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)
    gram = rows @ rows.T
    solution = min_norm(gram)
    assert solution.found
    precise = rows.astype(np.float64)
    best = min_norm(precise @ precise.T).weights @ precise
    # The objective moves by the rounding of the Gramian, the weights may move more.
    assert (
        np.linalg.norm(solution.weights @ precise) ** 2
        <= best @ best + 1e-5 * np.linalg.norm(precise, axis=1).max() ** 2
    )


def test_repair_of_a_slightly_indefinite_matrix_is_told() -> None:
    cosine = np.cos(2 * np.pi / 3) - 1e-7
    solution = min_norm(np.full((3, 3), cosine) + (1 - cosine) * np.eye(3))
    assert "raised to 0" in solution.reason
    assert solution.stationary
    np.testing.assert_allclose(solution.weights, np.full(3, 1 / 3))


def test_a_poor_answer_would_be_called_poor() -> None:
    poor = Solution(np.array([1.0, 0.0]), found=False, gap=0.5, iterations=1, method="guess")
    assert not poor.is_optimal()
    assert poor.is_optimal(tol=0.5)
    assert exact_gap(np.eye(2), np.array([1.0, 0.0])) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_names_the_objectives(value: float) -> None:
    gram = np.eye(4)
    gram[2, :] = gram[:, 2] = value
    with pytest.raises(NonFiniteError, match=r"objective\(s\) 2 ") as caught:
        min_norm(gram)
    assert caught.value.objectives == ("2",)


def test_huge_finite_entries_are_not_taken_for_infinite() -> None:
    np.testing.assert_allclose(min_norm(1.5e308 * np.eye(4)).weights, np.full(4, 0.25))


@pytest.mark.parametrize(
    ("gram", "message"),
    [
        (np.ones((2, 3)), "square"),
        (np.ones(3), "square"),
        (np.ones((0, 0)), "square"),
        ([[1.0, 2.0], [3.0]], "square"),
        ([["a"]], "real numbers"),
        (torch.eye(2, dtype=torch.complex64), "real numbers"),
        ([[1.0, 0.5], [0.4, 1.0]], "symmetric"),
        ([[1.0, 2.0], [2.0, 1.0]], "semi-definite"),
        ([[-1.0, 0.0], [0.0, 1.0]], "squared norms"),
        ([[0.0, 1.0], [1.0, 1.0]], "semi-definite"),
        (np.full((3, 3), -0.9) + 1.9 * np.eye(3), "eigenvalue"),
    ],
)
def test_what_is_no_gramian_is_refused(gram: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        min_norm(gram)


def test_input_is_left_as_it_was() -> None:
    gram = torch.tensor([[1.0, 0.2, 0.0], [0.2, 2.0, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    before = gram.clone()
    min_norm(gram)
    assert torch.equal(gram, before)


@given(st.integers(2, 24), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_ties_are_those_that_comparing_all_pairs_finds(count: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    distinct = rng.standard_normal((max(1, round(share * count)), 6))
    distinct /= np.linalg.norm(distinct, axis=1, keepdims=True)
    rows = distinct[rng.integers(0, len(distinct), count)]
    rows = rows + 10.0 ** rng.uniform(-16, -8) * rng.standard_normal(rows.shape) * rng.integers(0, 2, (count, 1))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix = rows @ rows.T
    np.fill_diagonal(matrix, 1.0)
    inverse_norms = rng.choice([1.0, 0.5], count)
    weights = rng.dirichlet(np.ones(count))
    same = np.abs(matrix[:, None, :] - matrix[None, :, :]).max(axis=2) <= 1e-12
    same &= inverse_norms[:, None] == inverse_norms
    expected = (same / same.sum(axis=1, keepdims=True)) @ weights
    np.testing.assert_allclose(_share_ties(matrix, inverse_norms, weights), expected / expected.sum(), rtol=1e-12)
