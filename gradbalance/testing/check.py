"""One call that checks what a balancer claims, and says in words where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, HypothesisException

from gradbalance.errors import InvalidArgumentError
from gradbalance.testing.case import Case, Factory
from gradbalance.testing.invariant import Invariant, on
from gradbalance.testing.strategies import cases, known_kinds


@dataclass(frozen=True, eq=False)
class Failure:
    """One broken claim.

    Attributes:
        claim: Which.
        case: The smallest input that was found.
        found: What was seen there.
    """

    claim: Invariant
    case: Case
    found: str

    def __str__(self) -> str:
        entries = [[f"{value:g}" for value in row] for row in self.case.rows.tolist()]
        matrix = "[" + ", ".join("[" + ", ".join(row) + "]" for row in entries) + "]"
        return (
            f"{self.claim.name}: {self.claim.claim}\n    smallest input ({self.case.kind}, K = {len(entries)}): rows "
            f"{matrix}\n    found: {self.found}"
        )


class ClaimError(AssertionError):
    """A balancer does not do what it claims.

    Attributes:
        failures: One :class:`Failure` per broken claim.
    """

    def __init__(self, message: str, failures: Sequence[Failure]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


def check_balancer(
    factory: Factory,
    *,
    claims: Sequence[Invariant | Callable[[Factory, Case], None]],
    kinds: Sequence[str] | None = None,
    objectives: int | tuple[int, int] = (1, 6),
    tolerance: float = 1e-6,
    max_examples: int | None = None,
) -> None:
    """Search for inputs on which a balancer breaks what it claims.

    Rows of the kinds proved in :data:`~gradbalance.testing.KINDS` are drawn, and every claim is checked on those kinds
    it is about. Where one is broken, the input is shrunk to the smallest of that kind that still breaks it. All claims
    are searched: one broken claim does not hide another.

    Args:
        factory: Makes a new balancer, for example its class. Called often.
        claims: Invariants of this package, or functions of the same form ``(factory, case) -> None`` that raise
            AssertionError, whose docstring says what they claim; those are about all kinds.
        kinds: Restrict the search to these kinds of rows; None for all.
        objectives: K, or the least and most K.
        tolerance: Relative error allowed where claims compare numbers; each says how it is used.
        max_examples: How many inputs, shared equally among the kinds; None for the number in the current hypothesis
            profile.

    Raises:
        ClaimError: A claim is broken; the message has each broken claim in words, with its smallest input.
        InvalidArgumentError: ``factory`` makes no callable, ``claims`` is empty or no claim, a claim is about none of
            the ``kinds``, or another argument is out of its range.

    >>> import gradbalance as gb
    >>> from gradbalance.testing import non_conflict
    >>> try:
    ...     check_balancer(gb.Mean, claims=[non_conflict], objectives=2, max_examples=100)
    ... except ClaimError as error:
    ...     print(error.failures[0].claim.name)
    non_conflict
    """
    _check_factory(factory)
    if isinstance(tolerance, bool) or not 0 <= tolerance < 1:
        raise InvalidArgumentError(f"`tolerance` should be in [0, 1). Found {tolerance!r}.")
    if max_examples is not None and (isinstance(max_examples, bool) or max_examples < 1):
        raise InvalidArgumentError(f"`max_examples` should be a number >= 1. Found {max_examples!r}.")
    invariants = _invariants(claims)
    allowed = known_kinds(kinds, objectives)
    for invariant in invariants:
        if not set(invariant.kinds) & set(allowed):
            raise InvalidArgumentError(
                f"claim {invariant.name} is about rows of kinds {list(invariant.kinds)}, but only {allowed} are drawn. "
                "Widen `kinds` or `objectives`, or leave the claim out."
            )
    per_kind = math.ceil((max_examples or settings().max_examples) / len(allowed))
    failures: list[Failure] = []
    # Kind by kind, so that none is missed by chance.
    for kind in allowed:
        search = cases(kinds=[kind], objectives=objectives, tolerance=tolerance)
        remaining = [invariant for invariant in invariants if kind in invariant.kinds]
        while remaining and (failure := _search(factory, remaining, search, per_kind)):
            failures.append(failure)
            remaining.remove(failure.claim)
            invariants.remove(failure.claim)
    if failures:
        name = getattr(factory, "__qualname__", repr(factory))
        details = "\n\n".join(f"  {failure}" for failure in failures)
        raise ClaimError(f"{name} breaks {len(failures)} of its {len(claims)} claims.\n\n{details}", failures)


def _check_factory(factory: Factory) -> None:
    """Call it once: a balancer in its place would seem to break every claim."""
    rule = "`factory` should be a callable without arguments that makes a balancer"
    remedy = "Pass the class, or a lambda."
    if not callable(factory):
        raise InvalidArgumentError(f"{rule}. Found {factory!r}. {remedy}")
    try:
        made = factory()
    except Exception as error:
        raise InvalidArgumentError(
            f"{rule}. Found {factory!r}, and {type(error).__name__}: {error}. {remedy}"
        ) from error
    if not callable(made):
        raise InvalidArgumentError(f"{rule}. Found {factory!r}, which made {made!r}. {remedy}")


def _invariants(claims: Sequence[Invariant | Callable[[Factory, Case], None]]) -> list[Invariant]:
    given = list(claims)
    if not given or not all(callable(claim) for claim in given):
        raise InvalidArgumentError(
            f"`claims` should hold at least one invariant, such as gradbalance.testing.finite_output. Found {claims!r}."
        )
    return [claim if isinstance(claim, Invariant) else on()(claim) for claim in given]


def _search(
    factory: Factory, invariants: Sequence[Invariant], search: st.SearchStrategy[Case], max_examples: int
) -> Failure | None:
    """Find an input that breaks one of the invariants, and shrink it; None if there is none."""
    failures: list[Failure] = []

    # Shrinking without the explanation of why an input fails, which is about our code and not about the balancer.
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(search)
    def look(case: Case) -> None:
        # Once one claim is broken, shrink the input for that claim.
        for claim in [failures[0].claim] if failures else invariants:
            found = _violation(claim, factory, case)
            if found is not None:
                failures[:] = [Failure(claim, case, found)]
                raise AssertionError(found)

    try:
        look()
    except Flaky:
        failure = failures[0]
        return Failure(failure.claim, failure.case, f"{failure.found} (not again with the same input: it is random)")
    except AssertionError:
        # Hypothesis runs the smallest input last.
        return failures[0]
    return None


def _violation(claim: Invariant, factory: Factory, case: Case) -> str | None:
    """What breaks the claim on this case; an exception of the balancer does."""
    with torch.random.fork_rng(devices=[]):
        # A balancer that draws random numbers should fail again on the same input.
        torch.manual_seed(0)
        try:
            claim(factory, case)
        except HypothesisException:
            raise
        except AssertionError as error:
            return str(error) or "an assertion without a message"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None
