"""The walk over the graph: linear, complete, and wary of reentrant checkpointing."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradbalance.errors import CollectorError
from gradbalance.gradients.graph import explore
from gradbalance.gradients.record import record


def test_leaves_of_losses_and_of_the_extra_loss() -> None:
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    graph = explore([(a * b).sum(), b.sum()], extra_loss=(b * c).sum())
    assert set(graph.leaves) == {id(a), id(b)}
    assert set(graph.extra_leaves) == {id(c)}
    assert graph.unrecorded == {id(a), id(b)}
    assert {id(leaf) for leaf in graph.outside([a])} == {id(b), id(c)}


def test_a_loss_that_is_a_leaf() -> None:
    leaf = nn.Parameter(torch.ones(()))
    assert list(explore([leaf]).leaves) == [id(leaf)]


def test_rejoining_paths_are_walked_once() -> None:
    """40 residual blocks have 2^40 paths: a walk per path would never end."""
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    for _ in range(40):
        x = layer(x) + x
    assert set(explore([x.sum()]).leaves) == {id(layer.weight), id(layer.bias)}


def test_deep_graphs_do_not_exhaust_the_stack() -> None:
    leaf = x = nn.Parameter(torch.ones(()))
    for _ in range(20_000):
        x = x + 1
    assert set(explore([x]).leaves) == {id(leaf)}


def test_reentrant_checkpointing_is_refused_with_the_remedy() -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=True).sum()
    with pytest.raises(CollectorError, match="use_reentrant=False"):
        explore([loss])
    assert id(layer.weight) in explore([checkpoint(layer, x, use_reentrant=False).sum()]).leaves


def test_recorded_and_other_uses_of_a_weight() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with record(nn.ModuleList([layer, other])):
        y = layer(torch.ones(1, 2)) + other(torch.ones(1, 2)) + other.weight.square().sum()
    graph = explore([y.sum()])
    assert graph.unrecorded == {id(other.weight)}
    assert len(graph.recordings) == 1
