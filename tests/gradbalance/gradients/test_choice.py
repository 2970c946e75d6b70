"""Which collector is taken, and why."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from collected_rows import assert_same, linear_rows, reference_rows
from gradbalance.affine import AffineLoss
from gradbalance.errors import CollectorError
from gradbalance.gradients.collect import choose, collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.losses import as_objectives
from gradbalance.gradients.record import record
from gradbalance.gradients.rows import Rows

MakeLoss = Callable[..., AffineLoss]


class TiedAndDirect(nn.Module):
    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.first, self.second, self.direct = nn.Linear(3, 3), nn.Linear(3, 3), direct
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return y @ self.first.weight if self.direct else y


def test_tied_layers_add_up_and_direct_uses_fall_to_passes(nft_loss: MakeLoss) -> None:
    x = torch.randn(6, 3)
    for direct in (False, True):
        model = TiedAndDirect(direct)
        parameters = list(model.parameters())
        with record(model):
            loss = nft_loss(model(x))
        objectives = as_objectives(loss)
        choice = choose(objectives, parameters, explore(objectives.roots), "auto")
        if direct:
            assert choice.collector == "passes"
            assert "'first.weight'" in choice.reason
            with pytest.raises(CollectorError, match=r"'first\.weight'"):
                choose(objectives, parameters, explore(objectives.roots), "linear")
        else:
            assert_same(linear_rows(loss, parameters), reference_rows(nft_loss(model(x)), parameters), 1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv1d(3, 2, 1), nn.Flatten()), "not recorded"),
        (
            nn.Sequential(nn.Flatten(1), nn.Unflatten(1, (1, 3)), nn.TransformerEncoderLayer(3, 1, 4, 0.0)),
            "in_proj_weight",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 3), nn.LayerNorm(3)), r"'2\.weight', '2\.bias'"),
        (nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))), r"parametrizations"),
    ],
)
def test_auto_falls_to_passes_and_says_why(model: nn.Module, reason: str, nft_loss: MakeLoss) -> None:
    with record(model):
        objectives = as_objectives(nft_loss(model(torch.randn(6, 3, 1))))
    choice = choose(objectives, list(model.parameters()), explore(objectives.roots), "auto")
    assert choice.collector == "passes"
    assert re.search(reason, choice.reason)


def test_auto_takes_the_fewer_passes(block: nn.Module) -> None:
    with record(block):
        terms = block(torch.randn(6, 4, 3, 5)).square().T
    for count, expected in ((2, "passes"), (3, "linear")):
        objectives = as_objectives(AffineLoss(terms, torch.randn(count, 2, 6)))
        assert choose(objectives, list(block.parameters()), explore(objectives.roots), "auto").collector == expected


def test_extra_use_in_the_extra_loss_is_no_obstacle(block: nn.Module, nft_loss: MakeLoss) -> None:
    with record(block):
        objectives = as_objectives(nft_loss(block(torch.randn(6, 4, 3, 5))))
    penalty = sum(parameter.square().sum() for parameter in block.parameters())
    assert isinstance(penalty, Tensor)
    graph = explore(objectives.roots, penalty)
    assert choose(objectives, list(block.parameters()), graph, "auto").collector == "linear"


def test_nothing_reached_is_an_error() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    objectives = as_objectives({"a": weight.sum()})
    with pytest.raises(CollectorError, match="none of the 1 balanced parameters"):
        collect(objectives, Rows([other], 1), explore(objectives.roots), collector="auto", check=False)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_modules_fall_to_passes(nft_loss: MakeLoss) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(6, 3)
    with record(model):
        objectives = as_objectives(nft_loss(compiled(x)))
    rows, graph = Rows(list(model.parameters()), 4), explore(objectives.roots)
    choice = collect(objectives, rows, graph, collector="auto", check=True)
    assert choice.collector == "passes"
    assert "compiled" in choice.reason
    assert_same(rows, reference_rows(nft_loss(model(x)), list(model.parameters())), 1e-5)
