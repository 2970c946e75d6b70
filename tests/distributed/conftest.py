from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rank_pool import RankPool


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """``on_ranks(W, function, *args)``: what the function returned on each of W ranks."""
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))

    def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        pool.size = size
        return pool.run(function, *args)

    yield run
    pool.stop()
