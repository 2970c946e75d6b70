"""The processes that ``torchrun`` or ``accelerate launch`` start, from their first meeting to their common end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import gradbalance as gb
from gradbalance.errors import GradBalanceError, InvalidArgumentError, RanksError

from .config import Config

# How long a failing rank lets another one say what has happened before it ends, which may end the whole job.
_SPEAKING = timedelta(seconds=10)


@contextlib.contextmanager
def distributed_session(config: Config) -> Iterator[gb.distributed.Ranks]:
    """Join the other processes of the job, if there are any, as ranks that train one model.

    ``torchrun`` and ``accelerate launch`` say by environment variables who takes part. Process r of a machine takes its
    GPU number r, with NCCL between GPUs and gloo between CPUs; without a GPU, or with ``model.device: cpu``, all is
    gloo. Started in the ordinary way the session is empty, and so is its cost.

    * **Output.** Only rank 0 prints to the standard output.
    * **Errors.** What a rank raises inside ends the job: the first one that fails writes its error to the standard
      error, with its number, and every rank that raises ends with exit code 1 (``SystemExit``). The launcher stops the
      others at once; without one they end in their next collective, or when ``run.timeout`` seconds have passed.

    Args:
        config: The whole configuration, which must be the same on every rank.

    Yields:
        The ranks, with gradients averaged by gradbalance.

    Raises:
        InvalidArgumentError: A device with a number, or more processes than GPUs.
        RanksError: The ranks have different configurations.
    """
    ranks = gb.distributed.Ranks("average")
    if not _launched():
        yield ranks
        return
    timeout = timedelta(seconds=config.run.timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    try:
        with contextlib.ExitStack() as quiet:
            if rank > 0:
                quiet.enter_context(contextlib.redirect_stdout(quiet.enter_context(open(os.devnull, "w"))))
                _silence_loading()
            dist.init_process_group(
                _choose_device(config.model.device),
                store=dist.PrefixStore("gradbalance", store),
                rank=rank,
                world_size=world,
                timeout=timeout,
            )
            _require_same(config)
            yield ranks
    except Exception as error:
        _tell_once(error, store, rank, world)
        raise SystemExit(1) from None
    dist.destroy_process_group()


@contextlib.contextmanager
def first_rank_prints() -> Iterator[None]:
    """Inside the block only the first process of a job prints; before there is a session to see to it."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    except SystemExit as end:
        if end.code:
            time.sleep(_SPEAKING.total_seconds())
        raise


def _launched() -> bool:
    environment = os.environ
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    if "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment:
        warnings.warn(
            "`accelerate launch` was asked for several processes and has started one: without several GPUs it does so "
            "unless told. Add --multi_gpu, on CPUs too, or use torchrun.",
            RuntimeWarning,
            stacklevel=4,
        )
    return False


def _choose_device(device: str) -> str:
    """Take this process's own GPU if there is one for it; returns the backends of ``init_process_group``."""
    if ":" in device:
        raise InvalidArgumentError(
            f"`model.device` must be auto, cuda or cpu with several processes, each of which takes a GPU of its own. "
            f"Found {device!r}. Choose among the GPUs with CUDA_VISIBLE_DEVICES."
        )
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    number, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= found:
        raise InvalidArgumentError(
            f"Every process of a machine must have a GPU of its own. Found {found} GPUs for process {number + 1}. "
            f"Start {found} processes per machine, or train on the CPU with model.device=cpu."
        )
    torch.cuda.set_device(number)
    return "cpu:gloo,cuda:nccl"


def _require_same(config: Config) -> None:
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, config.to_yaml())
    others = [rank for rank, text in enumerate(found) if text != found[0]]
    if others:
        ours, theirs = found[0].splitlines(), found[others[0]].splitlines()
        lines = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), (f"{len(ours)}", f"{len(theirs)}"))
        raise RanksError(
            f"The ranks must have the same configuration. Found another one on {others}: {lines[1].strip()!r} instead "
            f"of {lines[0].strip()!r} of rank 0. Start all with the same command; to resume on machines without a "
            "common disk, pass --config or --preset."
        )


def _tell_once(error: Exception, store: dist.Store, rank: int, world: int) -> None:
    """Write an error to the standard error if no other rank has written one: what follows from it is no news."""
    what = f"{type(error).__name__}: {error}"
    try:
        first = store.add("failures", 1) == 1
    except Exception:  # the process that keeps the store is gone, having said why or not
        print(f"\nRank {rank} of {world} has lost the others. {what}", file=sys.stderr, flush=True)
        return
    if not first:
        with contextlib.suppress(Exception):
            store.wait(["told"], _SPEAKING)
        return
    if not isinstance(error, GradBalanceError):  # not said for the user: a traceback helps
        what = "".join(traceback.format_exception(error)).rstrip()
    # A progress bar may have left the cursor at the end of a line.
    print(f"\nRank {rank} of {world} has failed, which ends the job. {what}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        store.set("told", "")


def _silence_loading() -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
