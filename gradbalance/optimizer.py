"""An optimizer that balances: wraps any torch optimizer and owns the cycle between two of its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradbalance.balancer_state import check_classes, classes_of, loaded_states, states_of
from gradbalance.cycle import Cycle, OnRows
from gradbalance.distributed.agreement import agree
from gradbalance.distributed.engines import refuse_engine
from gradbalance.distributed.ranks import RanksLike, as_ranks, resolved
from gradbalance.distributed.setup import facts_of
from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance.gradients.collect import Collector, check_collector
from gradbalance.gradients.losses import Losses, Objectives, as_objectives, check_extra_loss
from gradbalance.gradients.record import Recording
from gradbalance.groups import (
    Balancers,
    by_name,
    check_balancers,
    check_param_groups,
    groups_of,
    plain_parameters,
)
from gradbalance.info import BalanceInfo
from gradbalance.solve import count_step, needs_rows


class BalancedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose gradient is the balanced one of several objectives.

    It is a ``torch.optim.Optimizer`` and shares ``param_groups``, ``state`` and ``defaults`` with the wrapped one:
    learning-rate schedulers, ``GradScaler`` and ``accelerate`` take it. One cycle is

        optimizer.zero_grad()
        for batch in micro_batches:
            optimizer.backward(losses(batch), extra_loss=penalty)
        optimizer.step()

    ``backward`` adds up the rows, and ``step`` takes their Gramian once, asks the balancer for weights, writes
    ``.grad`` and runs the wrapped step. (The Gramian of a sum is not the sum of Gramians.) To touch gradients in
    between, for example with ``clip_grad_norm_``, call :meth:`balance` first. Where the balancer needs no rows,
    ``backward`` is one ordinary backward pass.

    Parameter groups with ``"balanced": False`` (task heads) and leaves that are in no group get the plain gradient of
    the sum of losses, written to ``.grad`` by ``backward`` at once, as is that of ``extra_loss``.

    **A balancer per group.** Given a mapping ``{"encoder": MGDA(), "decoder": MARBLE()}``, each parameter group names
    its balancer: ``{"params": ..., "balanced": "encoder"}``. The groups of a name share rows, a Gramian and weights of
    their own; ``.grad`` is what :func:`gradbalance.backward` on the parameters of each would write. Rows are collected
    once, for all groups, in cycles in which any balancer needs them; the others then use their cached weights on the
    rows that are there. In cycles without rows, each distinct weighting is one backward pass that stops short of what
    lies behind its own parameters: one pass where all weights are equal, two for an encoder and a decoder. So give
    balancers with an interval the same one.

    **Several ranks** train one model where ``ranks`` says how; see :class:`gradbalance.distributed.Ranks`. An objective
    is then the mean over ranks of what each hands over, and every rank writes the same gradient. Rows of micro-batches
    add up on each rank, and ranks meet in :meth:`balance`, which all have to call equally often.

    **NaN and Inf** raise NonFiniteError by default. With ``on_nonfinite="skip"`` a cycle with a non-finite loss, row or
    plain gradient is skipped: ``balance`` sets every ``.grad`` that the cycle wrote to None and does not call the
    balancer, whose weights and averages stay; ``step`` returns without stepping the wrapped optimizer or counting a
    step of the balancer (a refresh stays due). ``info.skipped`` names the objectives and :attr:`skipped` counts
    the cycles. One bad micro-batch spoils its cycle, because means and counts are those of the whole cycle: without it
    the objectives would be weighed by the samples that happened to be left, each by another number. Losses are
    then looked at on every step, which off the CPU costs up to two device synchronizations per ``backward``, and
    gradients once a cycle. Learning-rate schedulers go on as you step them.

    Args:
        optimizer: Any torch optimizer that needs no closure.
        balancer: Any callable from Gramian to weights; see :func:`gradbalance.backward`. Or several by name.
        module: Records its linear layers by itself in cycles that need rows, so that an AffineLoss uses the cheap
            `linear` collector. Recording lasts from the first forward of the cycle with grad enabled to
            :meth:`balance`.
        collector: ``"auto"``, ``"passes"`` or ``"linear"``; see :func:`gradbalance.backward`.
        check_first_refresh: Compare one row of the first `linear` collection with an ordinary backward pass.
        scaler: The ``torch.amp.GradScaler`` in use. The losses given to :meth:`backward` are scaled ones
            (``{name: scaler.scale(loss)}``, or an AffineLoss of scaled terms). The balancer then sees the Gramian
            without the scale, and an overflow skips the step: the non-finite mean of the rows is written for the scaler
            to see, and the balancer is not called. Call ``balance()`` before ``scaler.unscale_`` and ``scaler.step``.
        on_nonfinite: ``"raise"`` or ``"skip"``; ``"skip"`` not together with an enabled scaler, which skips by itself.
        on_rows: Called in cycles with finite rows, before the balancer is asked, with the blocks [K, P_j] that make up
            the rows side by side (without the scale of the scaler), which are not to be kept or changed, and the K
            names. ``on_rows=meter.update`` feeds a :class:`~gradbalance.ConflictMeter` at no further pass.

    Attributes:
        optimizer: As given.
        balancer: As given.
        info: :class:`~gradbalance.BalanceInfo` of the last cycle that was balanced or skipped, None before.
        skipped: How many cycles were skipped under ``on_nonfinite="skip"``; part of the state_dict.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = BalancedOptimizer(torch.optim.SGD([weight], lr=0.1), lambda gram: gram.diagonal().rsqrt())
    >>> optimizer.backward({"a": 3 * weight[0], "b": 4 * weight[1]})
    >>> optimizer.step()
    >>> weight.detach()
    tensor([0.9000, 0.9000])
    >>> optimizer.zero_grad()

    A balancer for each of two groups:

    >>> from gradbalance import MARBLE, MGDA
    >>> encoder, decoder = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
    >>> groups = [
    ...     {"params": encoder.parameters(), "balanced": "encoder"},
    ...     {"params": decoder.parameters(), "balanced": "decoder"},
    ... ]
    >>> optimizer = BalancedOptimizer(torch.optim.SGD(groups, lr=0.1), {"encoder": MGDA(), "decoder": MARBLE()})
    >>> optimizer.backward(decoder(encoder(torch.ones(1, 3))).square().mean(0))
    >>> optimizer.balance().groups["encoder"].weights.shape
    torch.Size([2])
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        balancer: Balancers,
        *,
        module: nn.Module | None = None,
        collector: Collector = "auto",
        check_first_refresh: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        on_rows: OnRows | None = None,
        ranks: RanksLike = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, BalancedOptimizer):
            raise InvalidArgumentError(
                f"optimizer must be a plain torch.optim.Optimizer, found {type(optimizer).__name__}."
            )
        if type(optimizer).__module__.partition(".")[0] == "accelerate":
            # Its step does nothing while gradients accumulate: each micro-batch would be balanced by itself.
            raise InvalidArgumentError(
                f"optimizer must not be prepared by accelerate yet, found {type(optimizer).__name__}; wrap the plain "
                "one and prepare the result: accelerator.prepare(BalancedOptimizer(optimizer, ...))."
            )
        check_balancers(balancer)
        check_param_groups(balancer, optimizer.param_groups)
        check_collector(collector)
        refuse_engine(module)
        if on_rows is not None and not callable(on_rows):
            raise InvalidArgumentError(f"on_rows must be callable, found {type(on_rows).__name__}.")
        # A disabled scaler scales nothing and skips nothing: as if there was none.
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        _check_on_nonfinite(on_nonfinite, scaler)
        # Not super().__init__, which would build param_groups and state of its own. __setstate__ adds the hook tables
        # that the base class relies on.
        self.__setstate__({"optimizer": optimizer})
        self.balancer = balancer
        self.info: BalanceInfo | None = None
        self.skipped = 0
        self._collector: Collector = collector
        self._check = check_first_refresh
        self._scaler = scaler
        self._skip = on_nonfinite == "skip"
        self._on_rows = on_rows
        self._ranks = as_ranks(ranks)
        # Checked once, in the first cycle and the first without rows; again after a state was loaded.
        self._agreed = self._verified = False
        self._names: tuple[str, ...] | None = None
        self._cycle: Cycle | None = None
        self._recording = None if module is None or collector == "passes" else _record_when_due(self, module)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.optimizer.defaults

    @property
    def needs_rows(self) -> bool:
        """Is a refresh due: will this cycle collect per-objective gradients?"""
        return any(needs_rows(balancer) for balancer in by_name(self.balancer).values())

    @torch.enable_grad()
    def backward(self, losses: Losses, extra_loss: Tensor | None = None) -> None:
        """Take the gradients of one micro-batch into the cycle.

        Losses of micro-batches add up, as gradients do: divide means by the number of micro-batches, or give an
        AffineLoss the ``counts`` of the whole cycle.

        Args:
            losses: A dict name -> scalar, a sequence, a tensor [K], or an AffineLoss; the same objectives in every
                call. A dict in another order is aligned by name.
            extra_loss: Added outside the balancing to everything it reaches.

        Raises:
            StateError: The cycle was balanced already, or :meth:`balance` failed.
            InvalidArgumentError: Losses of a wrong form, or other objectives than before.
            NonFiniteError: A loss is NaN or Inf, no scaler was handed over and ``on_nonfinite`` is ``"raise"``; the
                micro-batch leaves no trace. On several ranks :meth:`balance` raises it instead, on all of them.
            CollectorError: Rows cannot be collected. The cycle is dropped.
            RanksError: The ranks are not set up alike, or ``ranks`` was not given; in the first cycle, on all ranks.
        """
        if self._cycle is not None and self._cycle.info is not None:
            raise StateError(
                "backward() after balance() in the same cycle: its gradients are written. Call step() or zero_grad() "
                "first."
            )
        if self._cycle is not None:
            self._cycle.require_not_failed()
        objectives = as_objectives(losses)
        check_extra_loss(extra_loss)
        names = self._names if self._cycle is None else self._cycle.names
        if names is not None:
            objectives = objectives.aligned(names)
        cycle = self._cycle or self._new_cycle(objectives)
        objectives = objectives.aligned(cycle.names)
        # Several ranks look at losses together, when the cycle ends: none may leave the others waiting.
        looks = self._scaler is None and not self._skip and not cycle.ranks.several
        if looks and (self.needs_rows or objectives.values.device.type == "cpu"):
            objectives.require_finite(extra_loss)
        # Dropped if add() fails: rows half-way are neither those of before nor those of after.
        self._cycle = None
        cycle.add(objectives, extra_loss, check=self._check)
        self._cycle = cycle

    def _new_cycle(self, objectives: Objectives) -> Cycle:
        groups = groups_of(self.balancer, self.param_groups)
        plain = plain_parameters(self.param_groups)
        trained = [*(parameter for group in groups for parameter in group.parameters), *plain]
        ranks = resolved(self._ranks, trained)
        if ranks.several and not self._agreed:
            options = {"skip": self._skip, "on_rows": self._on_rows is not None, "scaler": self._scaler is not None}
            facts = facts_of(self.optimizer, self.balancer, groups, options)
            objectives = objectives.aligned(agree(objectives.names, trained, facts, ranks))
            self._agreed = True
        return Cycle(
            objectives,
            groups,
            collector=self._collector,
            scaler=self._scaler,
            skip=self._skip,
            on_rows=self._on_rows,
            plain=plain,
            ranks=ranks,
        )

    def balance(self) -> BalanceInfo:
        """Finish the cycle: one Gramian, the balancer's weights, and the balanced gradient added to ``.grad``.

        A cycle that is skipped leaves ``.grad`` None instead.

        :meth:`step` does it where you did not. Calling it again before the next ``backward`` changes nothing.

        Returns:
            The info, which :attr:`info` keeps.

        Raises:
            StateError: No backward in this cycle, or this raised before: after any error ``zero_grad`` drops the cycle.
            NonFiniteError: A row is NaN or Inf (on several ranks also a loss, of any), no scaler was handed over and
                ``on_nonfinite`` is ``"raise"``; the balanced gradient is not written and the balancer is untouched.
            RanksError: The ranks are out of step, or gradients were not reduced as ``ranks`` says.
        """
        if self._cycle is None:
            raise StateError("nothing to balance: call optimizer.backward(losses) first, instead of loss.backward().")
        if self._cycle.info is None:
            info = self._cycle.finish(verify=not self._verified)
            self.skipped += bool(info.skipped)
            self._verified = self._verified or not (info.gram is not None or info.skipped)
            self._names = self._cycle.names
            if self._recording is not None:
                self._recording.remove()
        assert self._cycle.info is not None
        self.info = self._cycle.info
        return self.info

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Balance if not done yet, then step the wrapped optimizer and let the balancer count one step.

        Nothing is stepped or counted where the cycle was skipped.

        Args:
            closure: Evaluated once, before; it calls :meth:`backward` and its result is returned. The wrapped optimizer
                gets none.

        Raises:
            StateError: No backward since the last step; or a scaler is in use and ``balance()`` was not called before
                it.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._scaler is not None and (self._cycle is None or self._cycle.info is None):
            raise StateError(
                "step() with a scaler before balance(): the scaler has unscaled gradients that were not written "
                "yet. Call optimizer.balance() before scaler.unscale_(optimizer) and scaler.step(optimizer)."
            )
        if not self.balance().skipped:
            self.optimizer.step()
            for balancer in by_name(self.balancer).values():
                count_step(balancer)
        self._cycle = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset ``.grad`` of all groups and drop an open cycle with its rows."""
        self._drop_cycle()
        self.optimizer.zero_grad(set_to_none)

    def _drop_cycle(self) -> None:
        self._cycle = None
        if self._recording is not None:
            self._recording.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; ``"balanced"`` as in the groups that it was made with.

        Raises:
            InvalidArgumentError: ``"balanced"`` cannot be followed. Nothing is added then.
        """
        check_param_groups(self.balancer, [*self.param_groups, param_group])
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and as ``"balancer"`` the balancer's, its class, the objectives, :attr:`skipped`.

        With several balancers, class and state are dicts by their names.
        """
        return {
            **self.optimizer.state_dict(),
            "balancer": {
                "class": classes_of(self.balancer),
                "names": None if self._names is None else list(self._names),
                "state": states_of(self.balancer),
                "skipped": self.skipped,
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; an open cycle is dropped.

        Raises:
            StateError: No balancer state, that of other classes or names, or one that a balancer refuses. Nothing is
                changed then.
        """
        if "balancer" not in state_dict:
            raise StateError(
                "state_dict has no 'balancer': it is that of a plain optimizer. Load it with "
                "optimizer.optimizer.load_state_dict()."
            )
        saved = state_dict["balancer"]
        if set(saved) != {"class", "names", "skipped", "state"}:
            raise StateError(f"state_dict['balancer'] must hold class, names, skipped, state, found {sorted(saved)}.")
        check_classes(self.balancer, saved["class"])
        with loaded_states(self.balancer, saved["state"]):
            self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "balancer"})
        self._names = None if saved["names"] is None else tuple(saved["names"])
        self.skipped = saved["skipped"]
        self._agreed = self._verified = False
        self._drop_cycle()

    def __repr__(self) -> str:
        return f"BalancedOptimizer({self.optimizer!r}, balancer={self.balancer!r})"


def _check_on_nonfinite(on_nonfinite: str, scaler: torch.amp.GradScaler | None) -> None:
    if on_nonfinite not in ("raise", "skip"):
        raise InvalidArgumentError(f"on_nonfinite must be 'raise' or 'skip', found {on_nonfinite!r}.")
    if on_nonfinite == "skip" and scaler is not None:
        raise InvalidArgumentError(
            "on_nonfinite must be 'raise' with a scaler, found 'skip': the scaler skips steps that overflow by itself "
            "and has to see them to lower its scale. Leave on_nonfinite out."
        )


def _record_when_due(owner: BalancedOptimizer, module: nn.Module) -> Recording:
    """Let forwards of ``module`` start recording when ``owner`` needs rows; undone when ``owner`` is no more."""
    recording = Recording(module)
    # Weak, so that the module does not keep a discarded optimizer alive and recording.
    weak = weakref.ref(owner)

    def before_forward(module: nn.Module, args: Any) -> None:
        optimizer = weak()
        if optimizer is not None and torch.is_grad_enabled() and optimizer.needs_rows and not recording.installed:
            recording.install()

    handle = module.register_forward_pre_hook(before_forward)
    weakref.finalize(owner, handle.remove)
    weakref.finalize(owner, recording.remove)
    return recording
