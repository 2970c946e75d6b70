"""A balancer with a memory of the weights in use, and the numbers that a run logs of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import gradbalance as gb

Refresh = Literal["write", "lagged"]


class Balance:
    """Any balancer as a stateful one: it knows the weights of steps without rows, and can apply new ones a step later.

    Args:
        names: K objectives.
        balancer: Any callable from a Gramian to weights; see :func:`gradbalance.backward`.
        refresh: ``"write"``: a call gives the balancer's weights. ``"lagged"``: it gives zeros, so that nothing is
            written, and the balancer's weights are in use from the next step on.

    >>> balance = Balance(["a", "b"], gb.MGDA(), "lagged")
    >>> balance.weights, balance(torch.tensor([[1.0, 0.0], [0.0, 3.0]])), balance.weights
    (tensor([0.5000, 0.5000], dtype=torch.float64),
     tensor([0., 0.], dtype=torch.float64),
     tensor([0.7500, 0.2500], dtype=torch.float64))
    """

    def __init__(self, names: Sequence[str], balancer: gb.Balancer, refresh: Refresh) -> None:
        if not callable(balancer):
            raise gb.InvalidArgumentError(
                f"`balancer` should be callable from a Gramian to weights. Found {type(balancer).__name__}."
            )
        self.names = tuple(names)
        self.balancer: Any = balancer
        self.refresh = refresh
        self._solved: Tensor | None = None

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Ask the balancer; its weights, or zeros if they are to be used later."""
        self._solved = torch.as_tensor(self.balancer(gram)).detach().to("cpu", torch.float64)
        return torch.zeros_like(self._solved) if self.refresh == "lagged" else self._solved

    @property
    def needs_rows(self) -> bool:
        """Must this step collect the gradient of every objective?"""
        if hasattr(self.balancer, "weights_for"):
            return False
        return bool(getattr(self.balancer, "needs_rows", True))

    @property
    def ever_needs_rows(self) -> bool:
        """False for a balancer of constant weights."""
        return not hasattr(self.balancer, "weights_for")

    @property
    def weights(self) -> Tensor:
        """Weights [K] of this step if it collects no rows or refreshes late; 1/K before anything was solved."""
        if hasattr(self.balancer, "weights_for"):
            constant: Tensor = self.balancer.weights_for(len(self.names))
            return constant
        if self._solved is None:
            return torch.full((len(self.names),), 1 / len(self.names), dtype=torch.float64)
        if not hasattr(self.balancer, "needs_rows"):
            return self._solved
        try:
            cached: Tensor = self.balancer.weights
        except gb.StateError:
            # So far only rows of zeros, which teach a stateful balancer nothing.
            return torch.full_like(self._solved, 1 / len(self.names))
        return cached

    @property
    def coefficients(self) -> Tensor:
        """The balancer's simplex coefficients [K] where it has them, else its weights."""
        own = getattr(self.balancer, "coefficients", None)
        if own is not None:
            return torch.as_tensor(own)
        return self.weights if self._solved is None else self._solved

    def step(self) -> None:
        """One optimizer step has been made."""
        if hasattr(self.balancer, "needs_rows"):
            self.balancer.step()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, fit for JSON."""
        return {
            "balancer": type(self.balancer).__name__,
            "names": list(self.names),
            "state": self.balancer.state_dict() if hasattr(self.balancer, "needs_rows") else None,
            "solved": None if self._solved is None else self._solved.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            StateError: A state of other objectives or of another balancer; nothing is changed then.
        """
        own = self.state_dict()
        for key in ("balancer", "names"):
            if state.get(key) != own[key]:
                raise gb.StateError(
                    f"the checkpoint holds a balance with {key} {state.get(key)}, found {own[key]} now; train on with "
                    "the same rewards and balancer, or start from the saved weights without resume_from_checkpoint."
                )
        if state["state"] is not None:
            self.balancer.load_state_dict(state["state"])
        self._solved = None if state["solved"] is None else torch.tensor(state["solved"], dtype=torch.float64)


def metrics(balance: Balance, info: gb.BalanceInfo | None, weights: Tensor) -> dict[str, float]:
    """What is logged of a step: ``balance/NAME/coef`` always, norms and the worst cosine where rows were collected.

    Args:
        balance: After the step's call of the balancer, if there was one.
        info: Of a step with rows, else None.
        weights: [K] weights of the gradient that was written.

    Returns:
        ``balance/NAME/coef``: the coefficients, as solved last. ``balance/NAME/grad_norm``: the length of the gradient
        of this reward. ``balance/worst_cosine``: the least cosine between the written direction and the gradient of a
        reward that has one; below 0 the step opposes a reward.
    """
    logged = {
        f"balance/{name}/coef": value for name, value in zip(balance.names, balance.coefficients.tolist(), strict=True)
    }
    if info is None or info.gram is None or info.norms is None or info.overflow:
        return logged
    logged.update(
        (f"balance/{name}/grad_norm", value) for name, value in zip(info.names, info.norms.tolist(), strict=True)
    )
    alive = info.norms > 0
    if alive.any():
        logged["balance/worst_cosine"] = _cosines(info.gram, info.norms, weights)[alive].min().item()
    return logged


def _cosines(gram: Tensor, norms: Tensor, weights: Tensor) -> Tensor:
    """Cosines of the direction ``sum_k weights_k g_k`` with every row; all 0 where it vanishes to rounding."""
    scaled = weights.double() * norms
    image = gb.cosines(gram) @ scaled
    squared = torch.dot(scaled, image)
    if squared <= 1e-14 * scaled.abs().sum() ** 2:
        return torch.zeros_like(image)
    return image / squared.sqrt()
