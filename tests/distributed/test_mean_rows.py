"""Sharded rows against the plain reference: gather everything, average, multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbalance import gramian
from gradbalance.distributed import Ranks, mean_rows
from gradbalance.distributed.collectives import gather
from gradbalance.distributed.mean_rows import MeanRows
from gradbalance.gradients.rows import Rows

REDUCTIONS = ("reduce_scatter", "all_reduce")


def random_rows(generator: torch.Generator, own: torch.Generator, spread: float) -> tuple[Rows, list[Tensor], bool]:
    """Rows with sizes that all ranks share and numbers of this rank; some with plain gradients, some in two groups."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    count, tensors = number(1, 6), number(1, 5)
    dtype = torch.float64 if number(0, 2) else torch.float32
    shapes = [(number(0, 5), number(1, 9)) for _ in range(tensors)]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    groups = sorted(number(0, 2) for _ in range(tensors))
    groups = [group - groups[0] for group in groups]
    rows = Rows(parameters, count, groups)
    for k in range(count):
        scale = spread ** (2 * k / max(1, count - 1) - 1)
        rows.add(k, [scale * torch.randn(shape, generator=own, dtype=torch.float64).to(dtype) for shape in shapes])
    plain = bool(number(0, 2))
    if plain:
        for parameter in parameters[::2]:
            parameter.grad = torch.randn(parameter.shape, generator=own, dtype=torch.float64).to(dtype)
    return rows, parameters, plain


def mean_over_ranks(tensor: Tensor) -> Tensor:
    return gather(tensor.double(), None).mean(0)


def compare(seed: int, reduction: Any, bucket: int, whole: bool, spread: float) -> None:
    ranks = Ranks("average", reduction=reduction)
    generator = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * (ranks.rank + 1) + seed)
    rows, parameters, plain = random_rows(generator, own, spread)
    count, groups = len(rows.blocks[0]), range(max(rows.groups) + 1)

    expected = [mean_over_ranks(block) for block in rows.blocks]
    plains = [mean_over_ranks(p.grad if p.grad is not None else torch.zeros_like(p)) for p in parameters]
    grams = torch.stack(
        [gramian([row for row, group in zip(expected, rows.groups, strict=True) if group == own]) for own in groups]
    )
    weights = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in groups]
    directions = [weights[group] @ block for group, block in zip(rows.groups, expected, strict=True)]

    mean_rows.BUCKET = bucket
    mean = MeanRows(rows, ranks, plain=plain, reached=set(range(len(parameters))), whole=whole)
    tolerance = 1e-12 if parameters[0].dtype == torch.float64 else 2e-5
    norms = grams.diagonal(dim1=1, dim2=2).sqrt()
    error = (mean.gramians() - grams).abs() / (norms[:, :, None] * norms[:, None, :]).clamp(min=1e-300)
    assert error.max() < tolerance
    if whole:
        for block, reference in zip(mean.blocks, expected, strict=True):
            torch.testing.assert_close(block.double(), reference, rtol=tolerance, atol=tolerance / spread)
    mean.add_to_grad(*weights)
    for direction, indices in zip(directions, rows.members, strict=True):
        for j, part in zip(indices, direction.split([parameters[j].numel() for j in indices]), strict=True):
            parameter = parameters[j]
            assert parameter.grad is not None
            reference = part.view(parameter.shape) + plains[j]
            torch.testing.assert_close(parameter.grad.double(), reference, rtol=tolerance, atol=10 * tolerance * spread)
            every = gather(parameter.grad, None)
            assert torch.equal(every, every[:1].expand_as(every))


def compare_all(spread: float) -> None:
    bucket = mean_rows.BUCKET
    try:
        for seed in range(12):
            for reduction in REDUCTIONS:
                for small in (8, 64):
                    compare(seed, reduction, small, whole=False, spread=spread)
            compare(seed, "auto", bucket, whole=bool(seed % 2), spread=spread)
    finally:
        mean_rows.BUCKET = bucket


@pytest.mark.parametrize("size", [2, 3])
def test_shards_agree_with_the_gathered_reference(on_ranks: Any, size: int) -> None:
    on_ranks(size, compare_all, 1.0)


def test_row_norms_that_differ_by_sixty_orders_survive(on_ranks: Any) -> None:
    on_ranks(2, compare_all, 1e30)


def bytes_sent(reduction: Any) -> dict[str, int]:
    """Numbers handed to each collective for K = 4 rows of P = 1000."""
    sent: dict[str, int] = {}
    ranks = Ranks("average", reduction=reduction)
    parameter = nn.Parameter(torch.zeros(1000))
    rows = Rows([parameter], 4)

    def counted(name: str, function: Any) -> Any:
        def call(tensor: Tensor, *args: Any) -> Any:
            sent[name] = sent.get(name, 0) + tensor.numel()
            return function(tensor, *args)

        return call

    names = ("sum_", "gather", "reduce_scatter")
    kept = {name: getattr(mean_rows, name) for name in names}
    try:
        for name, function in kept.items():
            setattr(mean_rows, name, counted(name, function))
        MeanRows(rows, ranks, plain=False, reached={0}).add_to_grad(torch.ones(4))
    finally:
        for name, function in kept.items():
            setattr(mean_rows, name, function)
    return sent


def test_one_flat_buffer_and_nothing_more_is_sent(on_ranks: Any) -> None:
    assert on_ranks(2, bytes_sent, "reduce_scatter")[0] == {"reduce_scatter": 4000, "sum_": 16, "gather": 500}
    assert on_ranks(2, bytes_sent, "all_reduce")[0] == {"sum_": 4016, "gather": 500}
