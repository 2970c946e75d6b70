"""Checks that are all made and timed, whatever the earlier ones found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Check:
    """One check.

    Attributes:
        name: What is checked.
        seconds: How long it took.
        detail: What was found.
        fault: What is wrong; None: nothing.
        skipped: Not made, because what it needs failed; ``detail`` says so.
    """

    name: str
    seconds: float = 0.0
    detail: str = ""
    fault: str | None = None
    skipped: bool = False


@dataclass
class Checklist:
    """Collects checks; a fault never ends the program before the others are made.

    >>> checks = Checklist()
    >>> checks.value("one", lambda: 1)
    1
    >>> checks.value("two", lambda: 1 / 0) is None
    True
    >>> [check.fault for check in checks.checks], checks.faults
    ([None, 'ZeroDivisionError: division by zero'], 1)
    """

    checks: list[Check] = field(default_factory=list)

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Time the block; an exception in it becomes the fault of the check."""
        made = Check(name)
        self.checks.append(made)
        started = time.perf_counter()
        try:
            yield made
        except Exception as error:  # whatever it is, the user is to see the other checks too
            made.fault = f"{type(error).__name__}: {error}"
        finally:
            made.seconds = time.perf_counter() - started

    def value(self, name: str, make: Callable[[], T], detail: Callable[[T], str] = lambda value: "") -> T | None:
        """What ``make`` returns; None after a fault."""
        result = None
        with self.check(name) as made:
            result = make()
            made.detail = detail(result)
        return result

    def skip(self, name: str, missing: str) -> None:
        """Record a check that cannot be made without ``missing``."""
        self.checks.append(Check(name, detail=f"not checked: needs {missing}", skipped=True))

    @property
    def faults(self) -> int:
        """Number of checks with a fault."""
        return sum(check.fault is not None for check in self.checks)

    def table(self) -> str:
        """One line per check, faults in full below."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{_word(check):>7} {check.seconds:8.1f} s  {check.name:{width}}  {check.detail}".rstrip()
            for check in self.checks
        ]
        faults = [f"{check.name}: {check.fault}" for check in self.checks if check.fault is not None]
        return "\n".join([*lines, *(f"\n{fault}" for fault in faults)])


def _word(check: Check) -> str:
    return "FAILED" if check.fault is not None else "-" if check.skipped else "ok"


def joined(values: dict[str, Any]) -> str:
    """``a 1, b 2`` of a mapping."""
    return ", ".join(f"{key} {value}" for key, value in values.items())
