"""One cycle: the micro-batches between two optimizer steps, and the balanced gradient at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradbalance.describe import describe, describe_groups
from gradbalance.gradients.collect import Choice, Collector, collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.losses import Objectives
from gradbalance.gradients.plain import add_all, backward_scalarized, plain_gradients
from gradbalance.gradients.rows import Rows, gradients_are_finite, non_finite_rows, require_finite_rows
from gradbalance.groups import Group
from gradbalance.info import BalanceInfo
from gradbalance.solve import cached_weights, needs_rows, solve

OnRows: TypeAlias = Callable[[Sequence[Tensor], tuple[str, ...]], Any]


class Cycle:
    """Rows of some micro-batches, or the weights that make them unnecessary.

    Args:
        objectives: Of the first micro-batch; their names hold for the cycle.
        groups: The balanced parameters and their balancers, which are asked whether they need rows, and for their
            cached weights if not. Rows are collected for all groups if one needs them.
        collector: See :func:`gradbalance.backward`.
        scaler: A GradScaler whose scale the losses carry.
        skip: End the cycle without a gradient where anything is NaN or Inf.
        on_rows: Called with the blocks of the rows and the names just before the rows are combined.

    Attributes:
        names: K objectives.
        info: What was done; None until :meth:`finish`.
    """

    def __init__(
        self,
        objectives: Objectives,
        groups: Sequence[Group],
        *,
        collector: Collector,
        scaler: torch.amp.GradScaler | None,
        skip: bool,
        on_rows: OnRows | None,
    ) -> None:
        self.names = objectives.names
        self.info: BalanceInfo | None = None
        self._groups = tuple(groups)
        self._parameters = tuple(parameter for group in groups for parameter in group.parameters)
        self._collector: Collector = collector
        self._scaler = scaler
        self._skip = skip
        self._on_rows = on_rows
        self._spoiled: tuple[str, ...] = ()
        self._written: dict[int, Tensor] = {}
        # None where the balancer has to be asked at the end.
        self._cached = [
            None if needs_rows(group.balancer) else cached_weights(group.balancer, len(objectives)) for group in groups
        ]
        self._rows: Rows | None = None
        if any(weights is None for weights in self._cached):
            places = [place for place, group in enumerate(groups) for _ in group.parameters]
            self._rows = Rows(self._parameters, len(objectives), places)
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
            weightings = [
                (w, group.parameters) for w, group in zip(self._cached, self._groups, strict=True) if w is not None
            ]
            backward_scalarized(objectives, weightings, graph, extra_loss)
        else:
            outside = plain_gradients(objectives, self._parameters, graph, extra_loss)
            check = check and self._empty and graph.unchecked
            choice = collect(objectives, self._rows, graph, collector=self._collector, check=check)
            # One micro-batch that needed the slow way is what the user should hear of.
            if self._choice is None or choice.collector == "passes":
                self._choice = choice
            add_all(outside)
        self._empty = False

    def finish(self) -> BalanceInfo:
        """Ask the balancers that need rows, and write the balanced gradient.

        Raises:
            NonFiniteError: A row is NaN or Inf, without a scaler and not to be skipped. Nothing is written and no
                balancer is called.
        """
        grams = None if self._rows is None or self._spoiled else self._gramians(self._rows)
        if self._skip:
            self._spoiled = self._spoiled or self._non_finite(grams)
            if self._spoiled:
                return self._skipped()
        overflow = False
        if self._rows is None or grams is None:
            weights = [cached for cached in self._cached if cached is not None]
        else:
            overflow = self._scaler is not None and bool(non_finite_rows(grams.sum(0), self.names))
            weights = self._weights(grams, overflow)
            self._combine(self._rows, weights, overflow)
            # The rows are the largest thing here and no longer needed.
            self._rows = None
        self.info = self._describe(weights, grams, overflow)
        return self.info

    def _gramians(self, rows: Rows) -> Tensor:
        """Of each group: [G, K, K]. Their sum is the Gramian of whole rows."""
        return torch.stack([rows.gramian(place) for place in range(len(self._groups))]) / self._scale**2

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def _weights(self, grams: Tensor, overflow: bool) -> list[Tensor]:
        count = len(self.names)
        if overflow:
            return [torch.full((count,), 1 / count, dtype=torch.float64)] * len(grams)
        # Before the first balancer is asked: one that was asked has moved.
        require_finite_rows(grams.sum(0), self.names)
        return [
            solve(group.balancer, gram) if cached is None else cached
            for group, gram, cached in zip(self._groups, grams, self._cached, strict=True)
        ]

    def _combine(self, rows: Rows, weights: Sequence[Tensor], overflow: bool) -> None:
        scale = 1.0
        if self._on_rows is not None and not overflow:
            scale = self._scale
            if scale != 1.0:
                for block in rows.blocks:
                    block /= scale
            self._on_rows(rows.blocks, self.names)
        rows.add_to_grad(*(scale * own for own in weights))

    def _non_finite(self, grams: Tensor | None) -> tuple[str, ...]:
        if grams is not None and (bad := non_finite_rows(grams.sum(0), self.names)):
            return bad
        # Before the balancer is asked: what lies in .grad by now is all that steps without rows and task heads show.
        return () if gradients_are_finite(self._written.values()) else self.names

    def _skipped(self) -> BalanceInfo:
        for leaf in self._written.values():
            leaf.grad = None
        self._rows = None
        nothing = torch.zeros(len(self.names), dtype=torch.float64)
        self.info = self._describe([nothing] * len(self._groups), None, False)
        return self.info

    def _describe(self, weights: Sequence[Tensor], grams: Tensor | None, overflow: bool) -> BalanceInfo:
        infos = {}
        for place, group in enumerate(self._groups):
            infos[group.name] = describe(
                self.names,
                weights[place],
                self._losses,
                self._active,
                group.balancer,
                None if grams is None else grams[place],
                None if grams is None else self._choice,
                asked=self._cached[place] is None,
                overflow=overflow,
                skipped=self._spoiled,
            )
        return infos[""] if list(infos) == [""] else describe_groups(infos)
