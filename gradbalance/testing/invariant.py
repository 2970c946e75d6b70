"""What an invariant is: a claim in words, the kinds of rows it is about, and a function that looks for a violation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from gradbalance.errors import InvalidArgumentError
from gradbalance.testing.case import Case, Factory
from gradbalance.testing.kinds import KINDS


@dataclass(frozen=True)
class Invariant:
    """A claim about a balancer. Call it with a factory and a case; it raises AssertionError where the claim is broken.

    Attributes:
        check: The function.
        kinds: Kinds of rows that the claim is about.
    """

    check: Callable[[Factory, Case], None]
    kinds: tuple[str, ...]

    def __call__(self, factory: Factory, case: Case) -> None:
        """Raise AssertionError, saying what was found, if the balancer breaks the claim on this case."""
        self.check(factory, case)

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.check, "__name__", repr(self.check))

    @property
    def claim(self) -> str:
        """The claim in words: the first paragraph of the function's docstring."""
        text = inspect.getdoc(self.check) or "(no docstring)"
        return " ".join(text.split("\n\n")[0].split())


def on(*kinds: str) -> Callable[[Callable[[Factory, Case], None]], Invariant]:
    """Make a function an invariant about some kinds of rows; about all of them if none is given.

    >>> @on("conflicting")
    ... def gives_up(factory, case):
    ...     '''All weights are zero where objectives conflict.'''
    ...     assert not factory()(case.gram).any()
    >>> gives_up.name, gives_up.claim
    ('gives_up', 'All weights are zero where objectives conflict.')

    Raises:
        InvalidArgumentError: An unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise InvalidArgumentError(f"`kinds` should be among {list(KINDS)}. Found {unknown}.")

    def decorate(check: Callable[[Factory, Case], None]) -> Invariant:
        return Invariant(check, kinds or tuple(KINDS))

    return decorate


def broken(found: str) -> NoReturn:
    """Report a violation."""
    raise AssertionError(found)
