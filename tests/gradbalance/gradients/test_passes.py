"""K backward passes: the reference, held to hand-written gradients."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradbalance.errors import CollectorError
from gradbalance.gradients.losses import as_objectives
from gradbalance.gradients.passes import collect_by_passes
from gradbalance.gradients.rows import Rows


def test_rows_by_hand() -> None:
    a, b, unused = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.ones(1))
    rows = Rows([a, b, unused], 2)
    collect_by_passes(as_objectives({"product": (a * b).sum(), "square": (a**2).sum()}), rows)
    assert rows.blocks[0].tolist() == [[3, 2, 0], [4, 0, 0]]
    assert rows.reached == {0, 1}


def test_checkpointing_changes_nothing() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    found = []
    for checkpointed in (False, True):
        y = checkpoint(layers, x, use_reentrant=False) if checkpointed else layers(x)
        rows = Rows(list(layers.parameters()), 2)
        collect_by_passes(as_objectives(y.mean(0)), rows)
        found.append(rows.blocks[0])
    assert torch.equal(*found)


def test_nan_of_one_loss_stays_in_its_row() -> None:
    """A pass through one loss must not send zeros through the others, where 0 * inf is NaN."""
    weight = nn.Parameter(torch.zeros(1))
    rows = Rows([weight], 2)
    collect_by_passes(as_objectives({"root": weight.sum().sqrt(), "line": weight.sum()}), rows)
    assert torch.isinf(rows.row(0)[0])
    assert rows.row(1)[0].item() == 1


def test_a_freed_graph_names_the_objective_and_the_remedy() -> None:
    weight = nn.Parameter(torch.ones(2))
    shared = weight.tanh()
    shared.square().sum().backward()
    with pytest.raises(CollectorError, match=r"objective 'late'.*extra_loss") as caught:
        collect_by_passes(as_objectives({"late": shared.sum()}), Rows([weight], 1))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_runtime_errors_pass_unchanged() -> None:
    weight = nn.Parameter(torch.ones(2))
    y = weight * 1

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="mine") as caught:
        collect_by_passes(as_objectives({"a": y.sum()}), Rows([weight], 1))
    assert not isinstance(caught.value, CollectorError)
