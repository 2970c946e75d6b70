"""The K x P buffer against one concatenated float64 matrix."""

import pytest
import torch
from torch import Tensor, nn

from gradbalance.gradients.rows import Rows, balanced_parameters


def odd_parameters() -> list[nn.Parameter]:
    """Shapes, strides and dtypes that flattening gets wrong when it is careless."""
    return [
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(3, dtype=torch.bfloat16)),
        nn.Parameter(torch.randn(2, 3, 4)),
        nn.Parameter(torch.randn(0)),
        nn.Parameter(torch.randn(4, 5).t()),
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(2, dtype=torch.float16)),
    ]


def test_gramian_and_combination_of_odd_parameters() -> None:
    parameters = odd_parameters()
    rows = Rows(parameters, 3)
    gradients = [[torch.randn_like(parameter) for parameter in parameters] for _ in range(3)]
    for _ in range(2):  # two micro-batches
        for k, row in enumerate(gradients):
            rows.add(k, row)
    matrix = 2 * torch.stack([torch.cat([g.flatten().double() for g in row]) for row in gradients])
    torch.testing.assert_close(rows.gramian(), matrix @ matrix.T, rtol=1e-6, atol=1e-6)

    weights = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    kept = torch.randn_like(parameters[2])
    parameters[2].grad = kept.clone()
    rows.add_to_grad(weights)
    for j, parameter in enumerate(parameters):
        expected = sum(2 * w * row[j].double() for w, row in zip(weights, gradients, strict=True))
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.stride() == parameter.stride()
        expected = expected + (kept.double() if j == 2 else 0)
        tolerance = 3 * torch.finfo(parameter.dtype).eps
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=tolerance, atol=20 * tolerance)


def test_blocks_are_wide() -> None:
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert Rows([half], 1).blocks[0].dtype == torch.float32
    assert Rows([half, double], 1).blocks[0].dtype == torch.float64


def test_half_gradients_are_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    rows = Rows([parameter], 1)
    rows.add(0, [torch.tensor([1.0], dtype=torch.bfloat16)])
    for _ in range(64):
        rows.add(0, [torch.tensor([2.0**-10], dtype=torch.bfloat16)])
    assert rows.row(0)[0].item() == 1 + 64 / 1024


def test_unreached_parameters_keep_their_grad() -> None:
    used, unused, held = (nn.Parameter(torch.ones(2)) for _ in range(3))
    held.grad = torch.full((2,), 7.0)
    rows = Rows([used, unused, held], 2)
    rows.add(0, [torch.ones(2), None, None])
    rows.add_to_grad(torch.ones(2))
    assert unused.grad is None
    assert held.grad.tolist() == [7, 7]
    assert used.grad is not None


def test_view_is_part_of_the_buffer() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1, 2))
    rows = Rows([first, second], 2)
    view = rows.view(second)
    assert view is not None
    view += torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert rows.blocks[0].tolist() == [[0, 0, 1, 2], [0, 0, 3, 4]]
    assert rows.view(nn.Parameter(torch.ones(2))) is None
    assert rows.reached == {1}


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    (gradient,) = torch.autograd.grad(embedding(torch.tensor([1, 1])).sum(), [embedding.weight])
    rows = Rows([embedding.weight], 1)
    rows.add(0, [gradient])
    assert rows.row(0)[0].view(4, 2).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_combination_ignores_autocast() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    rows = Rows([parameter], 1)
    rows.add(0, [torch.tensor([1.0009765625])])
    with torch.autocast("cpu", torch.bfloat16):
        rows.add_to_grad(torch.ones(1, dtype=torch.float64))
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0009765625


@pytest.mark.parametrize("wrap", [list, iter, nn.ParameterList, lambda p: (x for x in p)])
def test_parameters_come_in_any_iterable(wrap: object) -> None:
    given: list[Tensor] = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2), requires_grad=False)]
    assert len(balanced_parameters(wrap(given))) == 1  # type: ignore[operator]
