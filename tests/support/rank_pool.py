"""Processes that stay alive between tests and run functions of test files as the ranks of a gloo group."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Collectives give up first, so that a hang shows where it hung; then the pool does.
COLLECTIVES, REPLY = timedelta(seconds=60), 120.0


class RankPool:
    """W processes, started once: importing torch takes seconds.

    Args:
        size: W; it may be set anew between two runs, and then only processes that lack are started.
        folder: For rendezvous files.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._jobs = 0
        self._members: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank of a fresh group of these processes; what each returned.

        Args:
            function: At the top level of its file.
            args: Plain values.

        Raises:
            AssertionError: A rank raised or did not answer in time; all tracebacks are shown. The processes are started
                anew then.
        """
        self._start()
        members = self._members[: self.size]
        self._jobs += 1
        rendezvous = self._folder / f"rendezvous-{os.getpid()}-{self._jobs}"
        job = pickle.dumps((function.__code__.co_filename, function.__name__, args, str(rendezvous), self.size))
        for _, connection in members:
            connection.send_bytes(job)
        answers, failures = [], []
        for rank, (process, connection) in enumerate(members):
            if not connection.poll(REPLY):
                failures.append(f"rank {rank} did not answer within {REPLY:.0f} s")
                continue
            try:
                good, answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                process.join()
                failures.append(f"rank {rank} ended with exit code {process.exitcode}")
                continue
            answers.append(answer)
            if not good:
                failures.append(f"rank {rank}: {answer}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self._members), self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            self._members.append((process, ours))

    def stop(self) -> None:
        """End the processes."""
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._members.clear()


def _serve(connection: Connection, rank: int) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            file, name, args, rendezvous, size = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            function = getattr(_loaded(file), name)
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=COLLECTIVES
            )
            try:
                answer = pickle.dumps((True, function(*args)))
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _loaded(file: str) -> Any:
    """A test file as a module, under a name of its own: pytest imports by path and so do we."""
    name = f"on_ranks_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
