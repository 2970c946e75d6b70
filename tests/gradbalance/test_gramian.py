from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError
from gradbalance.gramian import cosines, direction_cosines, gramian, norms

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def make_rows(seed: int, count: int, columns: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@given(seeds, st.integers(1, 12), st.integers(0, 300), dtypes)
def test_equals_float64_products(seed: int, count: int, columns: int, dtype: torch.dtype) -> None:
    rows = make_rows(seed, count, columns, dtype)
    expected = rows.double() @ rows.double().T
    torch.testing.assert_close(gramian(rows), expected, rtol=1e-12, atol=1e-12)


@given(seeds, st.lists(st.integers(0, 50), min_size=1, max_size=5), dtypes)
def test_blocks_add_up_whatever_their_dtype(seed: int, widths: list[int], dtype: torch.dtype) -> None:
    rows = make_rows(seed, 4, sum(widths), torch.float16)
    blocks = list(rows.split(widths, dim=1))
    blocks[0] = blocks[0].to(dtype)
    expected = torch.cat([block.double() for block in blocks], dim=1)
    torch.testing.assert_close(gramian(blocks), expected @ expected.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [3, 9])
def test_many_chunks_equal_one_product(count: int) -> None:
    rows = make_rows(0, count, 200_001, torch.float32)
    expected = rows.double() @ rows.double().T
    torch.testing.assert_close(gramian(rows), expected, rtol=1e-11, atol=1e-7)


def test_norms_that_differ_by_sixty_orders_survive() -> None:
    rows = make_rows(0, 3, 1000, torch.float32)
    scale = torch.tensor([1e-30, 1.0, 1e30])
    scaled = cosines(gramian(rows * scale[:, None]))
    torch.testing.assert_close(scaled, cosines(gramian(rows)), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        norms(gramian(rows * scale[:, None])) / scale.double(), norms(gramian(rows)), rtol=1e-6, atol=0
    )


def test_float16_sums_do_not_overflow() -> None:
    rows = torch.full((2, 100_000), 60_000.0, dtype=torch.float16)
    value = float(rows[0, 0]) ** 2 * 100_000
    torch.testing.assert_close(gramian(rows), torch.full((2, 2), value, dtype=torch.float64))


@pytest.mark.parametrize("count", [7, 13])
def test_exactly_symmetric_and_detached(count: int) -> None:
    gram = gramian(make_rows(1, count, 1003, torch.float32).requires_grad_())
    assert torch.equal(gram, gram.T)
    assert not gram.requires_grad
    assert gram.dtype == torch.float64


def test_non_contiguous_rows() -> None:
    rows = make_rows(2, 50, 4)
    torch.testing.assert_close(gramian(rows.T), rows.T @ rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [3, 9])
def test_non_finite_rows_show_in_their_entries(count: int, bad: float) -> None:
    rows = make_rows(3, count, 5)
    rows[1, 2] = bad
    rows[2, 2] = 0.0
    finite = torch.isfinite(gramian(rows))
    assert finite[0, 2]
    assert not finite[1, :3].any()


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(3),
        torch.ones(2, 2, 2),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.complex64),
        [],
        [torch.ones(2, 3), torch.ones(3, 3)],
        [torch.ones(()), torch.ones(3, 3)],
    ],
)
def test_what_are_no_rows_is_refused(rows: torch.Tensor | list[torch.Tensor]) -> None:
    with pytest.raises(InvalidArgumentError, match="rows"):
        gramian(rows)


def test_zero_row_has_no_cosines() -> None:
    cosine = cosines(gramian(torch.tensor([[1.0, 1.0], [0.0, 0.0], [-2.0, -2.0]])))
    torch.testing.assert_close(cosine, torch.tensor([[1.0, 0, -1], [0, 0, 0], [-1, 0, 1]], dtype=torch.float64))


@given(seeds, st.integers(1, 8), st.floats(-12, 12))
def test_direction_cosines_equal_those_of_the_direction(seed: int, count: int, spread: float) -> None:
    rows = make_rows(seed, count, 40)
    scale = 10.0 ** (spread * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) / scale
    scaled = rows * scale[:, None]
    expected = torch.cosine_similarity((weights @ scaled)[None], scaled, eps=1e-300)
    torch.testing.assert_close(direction_cosines(gramian(scaled), weights), expected, rtol=0, atol=1e-9)


def test_direction_cosines_where_there_is_no_direction() -> None:
    opposite = gramian(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert torch.equal(direction_cosines(opposite, torch.tensor([1.0, 1.0])), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(
        direction_cosines(torch.zeros(2, 2), torch.tensor([1.0, 1.0])), torch.zeros(2, dtype=torch.float64)
    )
    with_zero = gramian(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    assert direction_cosines(with_zero, torch.tensor([1.0, 1.0])).tolist() == [1.0, 0.0]
