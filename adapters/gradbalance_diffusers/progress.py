"""Progress bars, on the first rank only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

import gradbalance as gb


def progress_bar(iterable: Iterable[Any] | None = None, *, disable: bool = False, **options: Any) -> tqdm[Any]:
    """A ``tqdm`` bar that the first rank shows and the others do not.

    >>> list(progress_bar([1, 2], disable=True))
    [1, 2]
    """
    return tqdm(iterable, disable=disable or gb.distributed.Ranks("average").rank > 0, **options)
