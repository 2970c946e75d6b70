"""Set up every test session: reproducible randomness, and how long hypothesis searches.

The default profile draws the same inputs on every run, so that a change is judged by what it changes;
HYPOTHESIS_PROFILE=nightly draws new ones, twenty times as many.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Wall-clock deadlines would make results depend on the machine's load. The health check for function-scoped fixtures is
# off because the one below does the same for every example.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
settings.register_profile("default", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name functions by their names: their default id holds an address, which differs between the worker processes."""
    return getattr(val, "__qualname__", None) if callable(val) else None
