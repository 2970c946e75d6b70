"""Every method of the core by name, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbalance import MARBLE, MGDA, Fixed, Mean, NashMTL

# Those that are told one number per objective take K, 2 if left out.
METHODS: dict[str, Callable[..., Any]] = {
    "Mean": Mean,
    "Fixed": lambda count=2: Fixed([1, 2, 4][:count]),
    "MGDA": MGDA,
    "MGDA normalized": lambda: MGDA(normalize=True),
    "MGDA floor": lambda: MGDA(floor=0.1),
    "MGDA preference": lambda count=2: MGDA(preference=[1, 3, 2][:count]),
    "NashMTL": lambda: NashMTL(interval=2),
    "MARBLE": lambda: MARBLE(interval=2),
    "MARBLE coefficients": lambda: MARBLE(interval=2, amortize="coefficients"),
    "MARBLE preference": lambda count=2: MARBLE(interval=2, preference=[1, 3, 2][:count]),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
every_solver = pytest.mark.parametrize("make", list(METHODS.values())[2:], ids=list(METHODS)[2:])


def flat(parameters: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in parameters])
