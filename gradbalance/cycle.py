"""One cycle: the micro-batches between two optimizer steps, and the balanced gradient at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradbalance.describe import describe, describe_groups
from gradbalance.distributed.agreement import require_equal_gradients, require_unequal_gradients
from gradbalance.distributed.collectives import everywhere, mean_gradients
from gradbalance.distributed.mean_rows import MeanRows
from gradbalance.distributed.meeting import Meeting
from gradbalance.distributed.ranks import Ranks
from gradbalance.distributed.sharded_rows import ShardedRows
from gradbalance.distributed.weights import shared_weights
from gradbalance.errors import NonFiniteError, RanksError, StateError
from gradbalance.gradients.collect import Choice, Collector, collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.losses import Objectives
from gradbalance.gradients.plain import add_all, backward_scalarized, plain_gradients
from gradbalance.gradients.rows import (
    Rows,
    gradients_are_finite,
    non_finite_rows,
    require_finite_rows,
    without_faint_rows,
)
from gradbalance.gradients.sharded import backward_sharded, collect_sharded, require_passes
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
        on_rows: Called with the blocks of the rows and the names before a balancer is asked.
        plain: Trained parameters outside the balanced ones.
        ranks: That train together. On several, :meth:`finish` is where they meet; until then nothing but the reduction
            of a wrapper is exchanged.

    Attributes:
        names: K objectives.
        ranks: As given.
        info: What was done; None until :meth:`finish`.
        failed: Did :meth:`finish` raise? What it had done until then cannot be done again: rows are averaged over ranks
            in place, and a balancer that was asked has moved.
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
        plain: Sequence[Tensor],
        ranks: Ranks,
    ) -> None:
        if on_rows is not None and ranks.mode == "fsdp":
            raise RanksError(
                "on_rows takes whole rows, found ranks='fsdp', under which each rank has a shard of them: leave it out."
            )
        self.names = objectives.names
        self.info: BalanceInfo | None = None
        self.failed = False
        self._groups = tuple(groups)
        self._parameters = tuple(parameter for group in groups for parameter in group.parameters)
        self._collector: Collector = collector
        self._scaler = scaler
        self._skip = skip
        self._on_rows = on_rows
        self._plain = tuple(plain)
        self.ranks = ranks
        self._spoiled: tuple[str, ...] = ()
        self._written: dict[int, Tensor] = {}
        # None where the balancer has to be asked at the end.
        self._cached = [
            None if needs_rows(group.balancer) else cached_weights(group.balancer, len(objectives)) for group in groups
        ]
        self._rows: Rows | MeanRows | ShardedRows | None = None
        if any(weights is None for weights in self._cached):
            places = [place for place, group in enumerate(groups) for _ in group.parameters]
            self._rows = Rows(self._parameters, len(objectives), places)
        self._choice: Choice | None = None
        self._losses = torch.zeros_like(objectives.values)
        self._extra = torch.zeros_like(self._losses[0])
        self._active = torch.zeros_like(objectives.active)
        self._empty = True

    def add(self, objectives: Objectives, extra_loss: Tensor | None, *, check: bool) -> None:
        """Take one micro-batch in; plain gradients and those of ``extra_loss`` go to ``.grad`` at once."""
        self._losses += objectives.values
        self._active |= objectives.active
        if extra_loss is not None:
            self._extra += extra_loss.detach().reshape(()).to(self._extra)
        if self._skip:
            bad = objectives.non_finite(extra_loss)
            self._spoiled += tuple(name for name in bad if name not in self._spoiled)
        spoiled = bool(self._spoiled) and not self._reduces_on_the_way
        # One rank of several looks all the same: which leaves there are is what ranks compare when they meet.
        if spoiled and not self.ranks.several:
            return
        if self.ranks.mode == "fsdp":
            self._add_sharded(objectives, extra_loss)
            return
        graph = explore(objectives.roots, extra_loss)
        self._written |= graph.leaves | graph.extra_leaves
        if spoiled:
            return
        if self._rows is None:
            backward_scalarized(objectives, self._weightings, graph, extra_loss)
        else:
            assert isinstance(self._rows, Rows)
            outside = plain_gradients(objectives, self._parameters, graph, extra_loss)
            check = check and self._empty and graph.unchecked
            choice = collect(objectives, self._rows, graph, collector=self._collector, check=check)
            # One micro-batch that needed the slow way is what the user should hear of.
            if self._choice is None or choice.collector == "passes":
                self._choice = choice
            add_all(outside)
        self._empty = False

    @property
    def _reduces_on_the_way(self) -> bool:
        """Do backward passes of this cycle reduce over ranks, so that no rank may leave one out?"""
        wrapped = self.ranks.mode == "ddp" and self._rows is None
        return self.ranks.several and (wrapped or self.ranks.mode == "fsdp")

    @property
    def _weightings(self) -> list[tuple[Tensor, Sequence[Tensor]]]:
        return [(w, group.parameters) for w, group in zip(self._cached, self._groups, strict=True) if w is not None]

    def _add_sharded(self, objectives: Objectives, extra_loss: Tensor | None) -> None:
        self._written |= {id(parameter): parameter for parameter in (*self._parameters, *self._plain)}
        if self._rows is None:
            backward_sharded(objectives, self._weightings, self._plain, extra_loss)
        else:
            assert isinstance(self._rows, Rows)
            self._choice = Choice("passes", require_passes(self._collector))
            collect_sharded(objectives, self._rows, extra_loss)

    def finish(self, *, verify: bool = False) -> BalanceInfo:
        """Ask the balancers that need rows, and write the balanced gradient.

        Args:
            verify: On several ranks, check in a cycle without rows that gradients were reduced as was said.

        Raises:
            NonFiniteError: A row (on several ranks also a loss, of any) is NaN or Inf, without a scaler and not to be
                skipped. The balanced gradient is not written and no balancer is called.
            RanksError: The ranks are out of step, or gradients were not reduced as was said.
            StateError: It raised before.
        """
        self.require_not_failed()
        self.failed = True
        self.info = self._finished(verify)
        self.failed = False
        return self.info

    def require_not_failed(self) -> None:
        """Raise where :meth:`finish` did.

        Raises:
            StateError: It did.
        """
        if self.failed:
            raise StateError(
                "balance() failed in this cycle, and what it had begun cannot be done twice: call zero_grad(), which "
                "drops the cycle, before the next backward()."
            )

    def _finished(self, verify: bool) -> BalanceInfo:
        if self.ranks.several:
            self._meet(verify)
        grams = None
        if self._rows is not None and not self._spoiled:
            grams = without_faint_rows(self._rows.gramians() / self._scale**2, self._rows.blocks)
        if self._skip:
            self._spoiled = self._spoiled or self._non_finite(grams)
            if self._spoiled:
                return self._skipped()
        overflow = False
        if self._rows is None or grams is None:
            weights = [cached for cached in self._cached if cached is not None]
        else:
            overflow = self._scaler is not None and bool(non_finite_rows(grams.sum(0), self.names))
            scale = 1.0
            if not overflow:
                # Before the first balancer is asked: one that was asked has moved.
                require_finite_rows(grams.sum(0), self.names)
                scale = self._shown(self._rows)
            weights = self._weights(grams, overflow)
            self._rows.add_to_grad(*(scale * own for own in weights))
            # The rows are the largest thing here and no longer needed.
            self._rows = None
        return self._describe(weights, grams, overflow)

    def _meet(self, verify: bool) -> None:
        """Bring losses, rows and gradients of all ranks together, and see that all go the same way from here."""
        rows, ranks = self._rows, self.ranks
        inside = {id(parameter) for parameter in (*self._parameters, *self._plain)}
        outside = [leaf for key, leaf in self._written.items() if key not in inside]
        leaves = [*self._parameters, *self._plain]
        reached = rows.reached if isinstance(rows, Rows) else set()
        here = [leaf.grad is not None or j in reached for j, leaf in enumerate(leaves)]
        plain = any(parameter.grad is not None for parameter in self._parameters)
        due = [weights is None for weights in self._cached]
        facts = self.names, due, [tuple(leaf.shape) for leaf in outside]
        meeting = Meeting(self._losses, self._extra, self._active, here, plain, facts, ranks)
        own, self._losses, self._active = self._losses, meeting.losses, meeting.active
        # An accelerator is not waited for on steps without rows, unless there is something to be asked for.
        if rows is not None or verify or self._skip or outside or own.device.type == "cpu":
            meeting.require_in_step()
            self._hear_of(tuple((*self.names, "extra_loss")[k] for k in meeting.bad))
            if self._spoiled:
                return
        # Ranks that have all gradients need not ask what the others have.
        present = here if all(here) else meeting.present
        written = [leaf for leaf, there in zip(leaves, present, strict=True) if there] + outside
        self._written |= {id(leaf): leaf for leaf in written}
        if rows is None:
            if ranks.mode == "average":
                if verify:
                    require_unequal_gradients(written, own, ranks)
                mean_gradients(written, ranks.group)
            elif verify and ranks.mode == "ddp":
                require_equal_gradients(written, ranks)
        elif ranks.mode == "fsdp":
            assert isinstance(rows, Rows)
            self._rows = ShardedRows(rows, ranks)
        else:
            assert isinstance(rows, Rows)
            places = {j for j in range(len(self._parameters)) if present[j]}
            mean_gradients(written[len(places) :], ranks.group)
            self._rows = MeanRows(rows, ranks, plain=meeting.plain, reached=places, whole=self._on_rows is not None)

    def _hear_of(self, bad: tuple[str, ...]) -> None:
        """Skip, or raise, on every rank for what is not finite on one."""
        if self._skip:
            self._spoiled = bad
        elif bad and self._scaler is None:
            raise NonFiniteError(
                f"losses must be finite on every rank, found NaN or Inf for {list(bad)} on one of {self.ranks.size}. "
                "The balancer was not called. Call zero_grad() before the next backward: plain gradients and those of "
                "cycles without rows are in .grad by now.",
                bad,
            )

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def _weights(self, grams: Tensor, overflow: bool) -> list[Tensor]:
        count = len(self.names)
        if overflow:
            return [torch.full((count,), 1 / count, dtype=torch.float64)] * len(grams)
        weights = [
            solve(group.balancer, gram) if cached is None else cached
            for group, gram, cached in zip(self._groups, grams, self._cached, strict=True)
        ]
        if not self.ranks.several:
            return weights
        asked = [group.balancer for group, cached in zip(self._groups, self._cached, strict=True) if cached is None]
        return shared_weights(weights, asked, self.ranks, self._losses.device)

    def _shown(self, rows: Rows | MeanRows | ShardedRows) -> float:
        """Let ``on_rows`` see the rows without the scale of the scaler; what they are then to be multiplied by."""
        if self._on_rows is None:
            return 1.0
        scale = self._scale
        if scale != 1.0:
            for block in rows.blocks:
                block /= scale
        self._on_rows(rows.blocks, self.names)
        return scale

    def _non_finite(self, grams: Tensor | None) -> tuple[str, ...]:
        if grams is not None and (bad := non_finite_rows(grams.sum(0), self.names)):
            return bad
        # Before the balancer is asked: what lies in .grad by now is all that steps without rows and task heads show.
        finite = gradients_are_finite(self._written.values())
        if self.ranks.several:
            finite = everywhere(finite, self.ranks.group, self._losses.device)
        return () if finite else self.names

    def _skipped(self) -> BalanceInfo:
        for leaf in self._written.values():
            leaf.grad = None
        self._rows = None
        nothing = torch.zeros(len(self.names), dtype=torch.float64)
        return self._describe([nothing] * len(self._groups), None, False)

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
