"""Finished measurements on disk, so that an interrupted experiment goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Store:
    """One JSON file per measurement, written whole or not at all.

    Args:
        folder: Where they lie. Delete it (or a part of it) to measure again.

    >>> import tempfile
    >>> store = Store(Path(tempfile.mkdtemp()))
    >>> store.get("a/b", lambda: 3), store.get("a/b", lambda: 4)
    (3, 3)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The measurement ``key``, made now if there is none; JSON values."""
        path = self.path(key)
        if not path.exists():
            value = measure()
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(value) + "\n", encoding="utf-8")
            os.replace(unfinished, path)
        return json.loads(path.read_text(encoding="utf-8"))

    def path(self, key: str) -> Path:
        """File of a measurement."""
        return self.folder / f"{key}.json"
