"""Daemon threads that run jobs in order; unlike an executor's, they never keep a finished program alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class SerialWorker:
    """One thread that runs its jobs one after the other, in the order they were submitted.

    The thread starts with the first job. A job that hangs delays the later ones of this worker, and no others; the
    threads of :class:`concurrent.futures.ThreadPoolExecutor` would also be waited for when the program ends.

    >>> SerialWorker().submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue ``job``; its result or exception arrives in the future."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradbalance-reward", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                run_into(future, job)
            except BaseException as error:  # sys.exit() would end this thread, and whoever waits for it would hang
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def run_into(future: Future[Any], job: Callable[[], Any]) -> None:
    """Run ``job`` here and put its result or exception into ``future``."""
    try:
        result = job()
    except Exception as error:  # whoever asks for the result raises it
        future.set_exception(error)
    else:
        future.set_result(result)
