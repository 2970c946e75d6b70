"""One cycle: the micro-batches between two optimizer steps, and the balanced gradient at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.describe import describe
from gradbalance.gradients.collect import Choice, Collector, collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.losses import Objectives
from gradbalance.gradients.plain import add_all, backward_scalarized, plain_gradients
from gradbalance.gradients.rows import Rows, gradients_are_finite, non_finite_rows, require_finite_rows
from gradbalance.info import BalanceInfo
from gradbalance.solve import BalancerLike, cached_weights, needs_rows, solve


class Cycle:
    """Rows of some micro-batches, or the weights that make them unnecessary.

    Args:
        objectives: Of the first micro-batch; their names hold for the cycle.
        parameters: The balanced set.
        balancer: Asked whether it needs rows, and for its cached weights if not.
        collector: See :func:`gradbalance.backward`.
        scaler: A GradScaler whose scale the losses carry.
        skip: End the cycle without a gradient where anything is NaN or Inf.

    Attributes:
        names: K objectives.
        info: What was done; None until :meth:`finish`.
    """

    def __init__(
        self,
        objectives: Objectives,
        parameters: Sequence[Tensor],
        balancer: BalancerLike,
        *,
        collector: Collector,
        scaler: torch.amp.GradScaler | None,
        skip: bool,
    ) -> None:
        self.names = objectives.names
        self.info: BalanceInfo | None = None
        self._parameters = tuple(parameters)
        self._collector: Collector = collector
        self._scaler = scaler
        self._skip = skip
        self._spoiled: tuple[str, ...] = ()
        self._written: dict[int, Tensor] = {}
        self._rows: Rows | None = None
        self._weights: Tensor | None = None
        if needs_rows(balancer):
            self._rows = Rows(parameters, len(objectives))
        else:
            self._weights = cached_weights(balancer, len(objectives))
        self._choice: Choice | None = None
        self._losses = torch.zeros_like(objectives.values)
        self._active = torch.zeros_like(objectives.active)
        self._empty = True

    def add(self, objectives: Objectives, extra_loss: Tensor | None, *, check: bool) -> None:
        """Take one micro-batch in; plain gradients and those of ``extra_loss`` go to ``.grad`` at once."""
        self._losses += objectives.values
        self._active |= objectives.active
        if self._skip:
            bad = objectives.non_finite(extra_loss)
            self._spoiled += tuple(name for name in bad if name not in self._spoiled)
            if self._spoiled:
                return
        graph = explore(objectives.roots, extra_loss)
        self._written |= graph.leaves | graph.extra_leaves
        if self._rows is None:
            assert self._weights is not None
            backward_scalarized(objectives, self._weights, self._parameters, graph, extra_loss)
        else:
            outside = plain_gradients(objectives, self._parameters, graph, extra_loss)
            check = check and self._empty and graph.unchecked
            choice = collect(objectives, self._rows, graph, collector=self._collector, check=check)
            # One micro-batch that needed the slow way is what the user should hear of.
            if self._choice is None or choice.collector == "passes":
                self._choice = choice
            add_all(outside)
        self._empty = False

    def finish(self, balancer: BalancerLike) -> BalanceInfo:
        """Ask the balancer if there are rows, and write the balanced gradient.

        Raises:
            NonFiniteError: A row is NaN or Inf, without a scaler and not to be skipped. Nothing is written and the
                balancer is not called.
        """
        gram = None if self._rows is None or self._spoiled else self._gramian(self._rows)
        if self._skip:
            self._spoiled = self._spoiled or self._non_finite(gram)
            if self._spoiled:
                return self._skipped(balancer)
        if self._rows is None or gram is None:
            assert self._weights is not None
            self.info = describe(self.names, self._weights, self._losses, self._active, balancer)
            return self.info
        overflow = self._scaler is not None and not bool(torch.isfinite(gram.diagonal()).all())
        if overflow:
            weights = torch.full((len(self.names),), 1 / len(self.names), dtype=torch.float64)
        else:
            require_finite_rows(gram, self.names)
            weights = solve(balancer, gram)
        self._rows.add_to_grad(weights)
        # The rows are the largest thing here and no longer needed.
        self._rows = None
        self.info = describe(
            self.names, weights, self._losses, self._active, balancer, gram, self._choice, overflow=overflow
        )
        return self.info

    def _gramian(self, rows: Rows) -> Tensor:
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        return rows.gramian() / scale**2

    def _non_finite(self, gram: Tensor | None) -> tuple[str, ...]:
        if gram is not None and (bad := non_finite_rows(gram, self.names)):
            return bad
        # Before the balancer is asked: what lies in .grad by now is all that steps without rows and task heads show.
        return () if gradients_are_finite(self._written.values()) else self.names

    def _skipped(self, balancer: BalancerLike) -> BalanceInfo:
        for leaf in self._written.values():
            leaf.grad = None
        self._rows = None
        nothing = torch.zeros(len(self.names), dtype=torch.float64)
        self.info = describe(self.names, nothing, self._losses, self._active, balancer, skipped=self._spoiled)
        return self.info
