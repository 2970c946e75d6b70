"""Every TorchJD weighting that takes a Gramian is a balancer as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradbalance as gb

aggregation = pytest.importorskip("torchjd.aggregation")

K = 4
# Arguments that have no default. What needs a solver that may be missing is looked up by name below.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "CAGradWeighting": lambda: aggregation.CAGradWeighting(c=0.5),
    "ConstantWeighting": lambda: aggregation.ConstantWeighting(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "CRMOGMWeighting": lambda: aggregation.CRMOGMWeighting(aggregation.MGDAWeighting()),
    "FairGradWeighting": lambda: aggregation.FairGradWeighting(alpha=1.0),
    "KrumWeighting": lambda: aggregation.KrumWeighting(n_byzantine=1),
}
NEEDS = {"CAGradWeighting": "cvxpy", "UPGradWeighting": "qpsolvers", "DualProjWeighting": "qpsolvers"}
# ExcessMTL keeps a state as large as the rows: it takes the Jacobian, which a balancer does not see.
NAMES = sorted({n for n in aggregation.__all__ if n.endswith("Weighting")} - {"Weighting", "ExcessMTLWeighting"})
KEEPS_STATE = {"CRMOGMWeighting", "GradVacWeighting", "MoDoWeighting", "PCDWeighting", "SDMGradWeighting"}


def make(name: str) -> Any:
    pytest.importorskip(NEEDS.get(name, "torchjd"))
    torch.manual_seed(1)  # PCGrad, GradVac and Random draw from the global generator
    return ARGUMENTS.get(name, getattr(aggregation, name))()


def problem(
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Linear, nn.ModuleList, Callable[[], dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    trunk = nn.Linear(6, 5, dtype=dtype)
    heads = nn.ModuleList(nn.Linear(5, 1, dtype=dtype) for _ in range(K))
    x, targets = torch.randn(16, 6, dtype=dtype), torch.randn(K, 16, 1, dtype=dtype)

    def losses() -> dict[str, torch.Tensor]:
        features = trunk(x).tanh()
        return {f"task {k}": (head(features) - targets[k]).square().mean() for k, head in enumerate(heads)}

    return trunk, heads, losses


def test_there_are_as_many_as_known() -> None:
    assert len(NAMES) == 18


@pytest.mark.parametrize("name", NAMES)
def test_backward_gives_the_weighted_rows(name: str) -> None:
    trunk, heads, losses = problem(torch.float64)
    parameters = [*trunk.parameters()]
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
            for loss in losses().values()
        ]
    )
    expected = make(name)(rows @ rows.T).detach()
    info = gb.backward(losses(), parameters, make(name))
    torch.testing.assert_close(info.weights, expected, rtol=1e-5, atol=1e-7, check_dtype=False)
    found = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(found, expected.to(rows.dtype) @ rows, rtol=1e-5, atol=1e-7)
    # Heads get the plain gradient of their loss.
    plain = torch.autograd.grad(sum(losses().values()), [*heads.parameters()])  # type: ignore[arg-type]
    for parameter, gradient in zip(heads.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_trains_and_keeps_state(name: str) -> None:
    trunk, heads, losses = problem()
    groups = [{"params": trunk.parameters()}, {"params": heads.parameters(), "balanced": False}]
    optimizer = gb.BalancedOptimizer(torch.optim.Adam(groups, lr=1e-2), make(name))
    before = sum(losses().values()).item()  # type: ignore[union-attr]
    for _ in range(20):
        optimizer.backward(losses())
        optimizer.step()
        optimizer.zero_grad()
    assert sum(losses().values()).item() < before  # type: ignore[union-attr]
    assert optimizer.info is not None
    assert torch.isfinite(optimizer.info.weights).all()
    state = copy.deepcopy(optimizer.state_dict())
    other = gb.BalancedOptimizer(torch.optim.Adam(groups_of(trunk, heads), lr=1e-2), make(name))
    if name in KEEPS_STATE:
        # Their buffers are None in a new instance and are then refused: an error, not a silent restart.
        mine = repr(other.state_dict())
        with pytest.raises(gb.StateError, match=rf"(?s){name} does not take the state .*Unexpected key"):
            other.load_state_dict(state)
        assert repr(other.state_dict()) == mine
    else:
        other.load_state_dict(state)
        assert other.state_dict()["state"].keys() == state["state"].keys()


def groups_of(trunk: nn.Module, heads: nn.Module) -> list[dict[str, Any]]:
    return [{"params": trunk.parameters()}, {"params": heads.parameters(), "balanced": False}]


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_rows_work(name: str) -> None:
    """The balancer sees a float64 Gramian whatever the model's dtype; 8 of TorchJD's methods refuse a bfloat16 one."""
    trunk, _, losses = problem(torch.bfloat16)
    info = gb.backward(losses(), trunk.parameters(), make(name))
    assert torch.isfinite(info.weights).all()
    assert trunk.weight.grad is not None
    assert trunk.weight.grad.dtype == torch.bfloat16
