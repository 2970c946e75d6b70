from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rank_pool import RankPool


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """``on_ranks(W, function, *args)``: what the function returned on each of W ranks."""
    pools: dict[int, RankPool] = {}

    def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if size not in pools:
            pools[size] = RankPool(size, tmp_path_factory.mktemp("ranks"))
        return pools[size].run(function, *args)

    yield run
    for pool in pools.values():
        pool.stop()
