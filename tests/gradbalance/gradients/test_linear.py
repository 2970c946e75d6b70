"""The `linear` collector against K passes, away from the easy road."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collected_rows import assert_same, linear_rows, reference_rows
from gradbalance.affine import AffineLoss
from gradbalance.errors import CollectorError
from gradbalance.gradients import linear
from gradbalance.gradients.collect import collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.linear import add_weight_rows
from gradbalance.gradients.losses import as_objectives
from gradbalance.gradients.record import Recording, record
from gradbalance.gradients.rows import Rows

MakeLoss = Callable[..., AffineLoss]


@given(
    st.integers(0, 2**31),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), max_size=2),
    st.sampled_from([7, 1 << 24]),
)
def test_contraction_equals_the_sum_in_words(
    seed: int, batch: int, objectives: int, wide: int, narrow: int, middle: list[int], chunk: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    coefficients, inputs, cotangents = (
        normal(objectives, batch),
        normal(batch, *middle, wide),
        normal(batch, *middle, narrow),
    )
    buffer = normal(objectives, narrow * wide + 3)
    expected = buffer.clone()
    for k in range(objectives):
        for i in range(batch):
            x, d = inputs[i].reshape(-1, wide), cotangents[i].reshape(-1, narrow)
            expected[k, 1:-2] += coefficients[k, i] * sum(torch.outer(d[t], x[t]) for t in range(len(x))).flatten()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_CHUNK", chunk)
        add_weight_rows(buffer[:, 1:-2], coefficients, inputs, cotangents)
    torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_ranks_biases_and_repeated_layers(
    block: nn.Module, nft_loss: MakeLoss, dtype: torch.dtype, tolerance: float, center: bool, checkpointed: bool
) -> None:
    block = block.to(dtype)
    x = torch.randn(6, 4, 3, 5, dtype=dtype)

    def loss() -> AffineLoss:
        with record(block):
            outputs = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return nft_loss(outputs, center=center)

    parameters = list(block.parameters())
    assert_same(linear_rows(loss(), parameters), reference_rows(loss(), parameters), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_position_per_sample_under_autocast(dtype: torch.dtype) -> None:
    """Products of single positions are taken in float32 where `passes` rounds to bf16; float64 layers stay float64."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    x, advantages = torch.randn(8, 5, dtype=dtype), torch.randn(8, 6)

    def loss() -> AffineLoss:
        with torch.autocast("cpu", torch.bfloat16), record(model):
            outputs = model(x)
        assert outputs.dtype == (torch.bfloat16 if dtype == torch.float32 else torch.float64)
        return AffineLoss.linear(outputs.to(dtype).square().sum(1), advantages)

    parameters = list(model.parameters())
    tolerance = 2**-7 if dtype == torch.float32 else 1e-10
    assert_same(linear_rows(loss(), parameters), reference_rows(loss(), parameters), tolerance)


def test_backward_called_inside_autocast_keeps_float32_rows(block: nn.Module, nft_loss: MakeLoss) -> None:
    x = torch.randn(6, 4, 3, 5)

    def loss() -> AffineLoss:
        with record(block):
            return nft_loss(block(x))

    parameters = list(block.parameters())
    expected = reference_rows(loss(), parameters)
    given = loss()
    with torch.autocast("cpu", torch.bfloat16):
        objectives, rows = as_objectives(given), Rows(parameters, 4)
        collect(objectives, rows, explore(objectives.roots), collector="linear", check=True)
    assert_same(rows, expected, 1e-5)


def test_forward_without_grad_in_between(block: nn.Module, nft_loss: MakeLoss) -> None:
    x = torch.randn(6, 4, 3, 5)
    parameters = list(block.parameters())
    expected = reference_rows(nft_loss(block(x)), parameters)
    with record(block):
        with torch.no_grad():
            old = block(x)
        outputs = block(x)
        with torch.no_grad():
            block(x + 1)
    assert not old.requires_grad
    assert_same(linear_rows(nft_loss(outputs), parameters), expected, 1e-5)


def test_recorded_forward_gives_ordinary_gradients(block: nn.Module) -> None:
    x = torch.randn(6, 4, 3, 5, requires_grad=True)
    leaves = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), leaves)
    with record(block):
        y = block(x)
    for found, reference in zip(torch.autograd.grad(y.square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)


def test_recording_leaves_no_trace(block: nn.Module) -> None:
    before = [set(layer.__dict__) for layer in block.modules()]
    with pytest.raises(ValueError, match="mine"), record(block):
        raise ValueError("mine")
    outer = Recording(block)
    outer.install()
    with record(block):  # nested: the outer one keeps its layers
        pass
    assert block.embed(torch.ones(1, 5)).grad_fn.name() == "RecordedLinearBackward"  # type: ignore[operator]
    outer.remove()
    assert [set(layer.__dict__) for layer in block.modules()] == before


def test_checkpointed_layers_are_recomputed_recorded_and_then_no_more(block: nn.Module, nft_loss: MakeLoss) -> None:
    """Two steps: the second, unrecorded and checkpointed, must not be recomputed as if it were recorded."""
    x = torch.randn(6, 4, 3, 5)
    with record(block):
        outputs = checkpoint(block, x, use_reentrant=False)
    assert not any("forward" in layer.__dict__ for layer in block.modules())
    linear_rows(nft_loss(outputs), list(block.parameters()))
    assert not any("forward" in layer.__dict__ for layer in block.modules())
    checkpoint(block, x, use_reentrant=False).sum().backward()


def test_frozen_layers_run_untouched_and_partly_frozen_ones_are_right(nft_loss: MakeLoss) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    x = torch.randn(6, 3)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with record(model):
        assert model[0](x).grad_fn is None
        loss = nft_loss(model(x))
    assert_same(linear_rows(loss, parameters), reference_rows(nft_loss(model(x)), parameters), 1e-5)


def test_recorded_but_unbalanced_layers_are_left_out(block: nn.Module, nft_loss: MakeLoss) -> None:
    x = torch.randn(6, 4, 3, 5)
    with record(block):
        loss = nft_loss(block(x))
    trunk = [block.embed.weight, block.twice.bias]
    assert_same(linear_rows(loss, trunk), reference_rows(nft_loss(block(x)), trunk), 1e-5)


def test_batch_that_is_not_first_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.randn(4, 6, 3)
    with record(model):
        terms = model(x).sum((0, 2))  # the batch of 6 is second
    loss = AffineLoss.linear(terms, torch.randn(6, 3))
    with pytest.raises(CollectorError, match=r"layer '0' .* \[4, 6, 3\] .* batch of 6 samples.*passes"):
        linear_rows(loss, list(model.parameters()))


def test_mixed_samples_are_found_by_the_check() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    with record(model):
        terms = model(torch.randn(8, 3)).square().squeeze(1)
    objectives = as_objectives(AffineLoss.linear(terms, torch.randn(8, 3)))
    parameters = list(model.parameters())
    with pytest.raises(CollectorError, match=r"disagree .* '0\.(weight|bias)' is off .*batch normalization"):
        collect(objectives, Rows(parameters, 3), explore(objectives.roots), collector="auto", check=True)


def test_check_passes_under_half_precision_and_marks_the_module(nft_loss: MakeLoss) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.autocast("cpu", torch.bfloat16), record(model):
        outputs = model(torch.randn(6, 3))
    objectives = as_objectives(nft_loss(outputs.float()))
    graph = explore(objectives.roots)
    assert graph.unchecked
    collect(objectives, Rows(list(model.parameters()), 4), graph, collector="linear", check=True)
    assert not graph.unchecked


@pytest.mark.parametrize("half", [False, True])
def test_a_row_that_cancels_to_rounding_is_neither_wrong_nor_checked(half: bool) -> None:
    """DiffusionNFT before the first step, where no sample of a reward is better than another."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    x, target = torch.randn(6, 5, 3), torch.randn(6, 5, 2)

    def collected(r: Tensor) -> bool:
        with torch.autocast("cpu", torch.bfloat16, enabled=half), record(model):
            v = model(x).float()
        old = v.detach()
        plus, minus = ((b - target).square().mean((1, 2)) for b in (0.9 * old + 0.1 * v, 1.1 * old - 0.1 * v))
        mask = torch.tensor([[True, True]] * 3 + [[True, False]] * 3)
        objectives = as_objectives(AffineLoss.interpolate(plus, minus, r, mask))
        graph = explore(objectives.roots)
        collect(objectives, Rows(list(model.parameters()), 2), graph, collector="linear", check=True)
        return not graph.unchecked

    assert not collected(torch.full((6, 2), 0.5))
    assert collected(torch.rand(6, 2))


def test_half_precision_cotangents_are_as_large_as_on_other_steps() -> None:
    """A loss scale in the terms and the 1/n of a mean in the coefficients: only together are they in range."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x, r = torch.randn(6, 5, 8), torch.rand(6, 3)

    def loss() -> AffineLoss:
        with torch.autocast("cpu", torch.float16):
            outputs = model(x).float()
        terms = outputs.square().sum((1, 2)) * 2.0**20
        return AffineLoss.interpolate(terms, 2 * terms, r, counts=[2.0**14] * 3)

    with record(model):
        recorded = loss()
    parameters = list(model.parameters())
    rows = linear_rows(recorded, parameters)
    assert all(torch.isfinite(block).all() for block in rows.blocks)
    assert_same(rows, reference_rows(loss(), parameters), 5e-3)


@pytest.mark.parametrize("factor", [1.0, 2.0**-40, 3e-9, 7e20])
def test_the_size_of_coefficients_does_not_matter(factor: float) -> None:
    model = nn.Linear(3, 1)
    x, coefficients = torch.randn(5, 3), torch.randn(2, 1, 5)
    with record(model):
        recorded = AffineLoss(model(x).T, factor * coefficients)
    rows = linear_rows(recorded, list(model.parameters()))
    expected = reference_rows(AffineLoss(model(x).T, coefficients), list(model.parameters()))
    for block in rows.blocks:
        block /= factor
    assert_same(rows, expected, 1e-5)


def test_coefficients_that_are_all_zero() -> None:
    model = nn.Linear(3, 1)
    with record(model):
        recorded = AffineLoss(model(torch.randn(5, 3)).T, torch.zeros(2, 1, 5))
    assert not any(block.any() for block in linear_rows(recorded, list(model.parameters())).blocks)


class HalfBase(nn.Module):
    """A float32 layer before frozen half-precision ones, whose backward passes round what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(16, 16)
        self.base = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh()))).bfloat16()
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(self.trained(x).bfloat16()).float()


def test_check_allows_for_a_half_precision_base(nft_loss: MakeLoss) -> None:
    model = HalfBase()
    with record(model):
        outputs = model(torch.randn(32, 5, 16))
    objectives = as_objectives(nft_loss(outputs))
    graph = explore(objectives.roots)
    collect(objectives, Rows(list(model.trained.parameters()), 4), graph, collector="linear", check=True)
    assert not graph.unchecked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype: torch.dtype) -> None:
    """Mixed with float32 ones: each layer in its own dtype, rows in float32."""
    model = nn.Sequential(nn.Linear(3, 8).to(dtype), nn.Linear(8, 2))
    x, advantages = torch.randn(6, 5, 3).to(dtype), torch.randn(6, 4)

    def loss() -> AffineLoss:
        with record(model):
            return AffineLoss.linear(model[1](model[0](x).float()).square().sum((1, 2)), advantages)

    parameters = list(model.parameters())
    found = linear_rows(loss(), parameters)
    assert found.blocks[0].dtype == torch.float32
    assert_same(found, reference_rows(loss(), parameters), 4 * torch.finfo(dtype).eps)


def test_a_backward_of_ones_own_through_a_checkpointed_recorded_forward_is_loud(block: nn.Module) -> None:
    """It recomputes unrecorded layers: torch must refuse, not go wrong. The docstring of record says so."""
    with record(block):
        y = checkpoint(block, torch.randn(6, 4, 3, 5), use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()
