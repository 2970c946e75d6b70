"""Invariants of how a balancer behaves: what it remembers, saves, refuses and leaves alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import Tensor

from gradbalance.solve import cached_weights, count_step, needs_rows, solve
from gradbalance.testing.case import Case, Factory, drive
from gradbalance.testing.invariant import broken, on

# Enough to meet the next refresh of most; a balancer that refreshes more rarely is tested on its cached steps.
_STEPS_AFTER = 12


@on()
def determinism(factory: Factory, case: Case) -> None:
    """Two balancers made alike give bit for bit the same weights for the same steps (so all ranks agree)."""
    steps = (*case.earlier, case.rows)
    _same(drive(factory(), steps), drive(factory(), steps), "two balancers")


@on()
def memoryless(factory: Factory, case: Case) -> None:
    """Weights depend on the Gramian only, not on earlier calls."""
    seasoned = factory()
    for rows in case.earlier:
        solve(seasoned, rows @ rows.T)
    _same([solve(factory(), case.gram)], [solve(seasoned, case.gram)], "a new balancer and one that was called before")


@on()
def leaves_input_alone(factory: Factory, case: Case) -> None:
    """The Gramian handed in is not written to."""
    gram = case.gram
    solve(factory(), gram)
    if not torch.equal(gram, case.gram):
        broken(f"the Gramian {case.gram.tolist()} became {gram.tolist()}")


@on()
def constant(factory: Factory, case: Case) -> None:
    """The weights are the same for all Gramians, and `weights_for(K)` tells them without one."""
    balancer = factory()
    if not hasattr(balancer, "weights_for"):
        broken("it has no `weights_for`")
    told = cached_weights(balancer, len(case.rows))
    _same([told], [solve(balancer, case.gram)], "`weights_for` and a call")


@on()
def keeps_protocol(factory: Factory, case: Case) -> None:
    """Rows are asked for before the first call; after it, `weights` are K finite numbers, and `step` counts steps."""
    balancer = factory()
    if not hasattr(balancer, "needs_rows"):
        broken("it has no `needs_rows`: it is not stateful")
    if not needs_rows(balancer):
        broken("`needs_rows` is false before the first call")
    solve(balancer, case.gram)
    for _ in range(_STEPS_AFTER):
        count_step(balancer)
        if not needs_rows(balancer):
            cached_weights(balancer, len(case.rows))


@on()
def state_round_trip(factory: Factory, case: Case) -> None:
    """A state saved after some steps and loaded into a new balancer continues bit for bit."""
    one, other = factory(), factory()
    drive(one, case.earlier)
    other.load_state_dict(copy.deepcopy(_state(one)))  # type: ignore[attr-defined]
    later = ((case.rows, *case.earlier) * _STEPS_AFTER)[:_STEPS_AFTER]
    _same(drive(one, later), drive(other, later), "the balancer and its copy")


@on()
def plain_state(factory: Factory, case: Case) -> None:
    """The state is made of numbers, strings, lists and dicts: JSON gives it back unchanged."""
    balancer = factory()
    drive(balancer, (*case.earlier, case.rows))
    state = _state(balancer)
    try:
        back = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        broken(f"JSON refuses the state: {error}")
    if back != state:
        broken(f"state {state} came back as {back}")


@on()
def refuses_non_finite(factory: Factory, case: Case) -> None:
    """NaN or Inf in the Gramian raises an ArithmeticError or ValueError, and leaves no trace in later answers."""
    for value in (float("nan"), float("inf")):
        spoilt, other = factory(), factory()
        drive(spoilt, case.earlier)
        drive(other, case.earlier)
        gram = case.gram
        gram[0, :] = gram[:, 0] = value
        try:
            answer = spoilt(gram)
        except (ArithmeticError, ValueError):
            pass
        else:
            broken(f"a Gramian with {value} in row 0 got weights {answer.tolist()}")
        _same([solve(other, case.gram)], [solve(spoilt, case.gram)], "one that never saw it and one that did")


def _state(balancer: Any) -> Any:
    if not hasattr(balancer, "state_dict"):
        broken("it has no `state_dict`")
    return balancer.state_dict()


def _same(one: list[Tensor], other: list[Tensor], who: str) -> None:
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        if not torch.equal(a, b):
            broken(f"at step {step}, {who} give {a.tolist()} and {b.tolist()}")
