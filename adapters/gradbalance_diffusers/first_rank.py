"""What rank 0 does for all: it alone has the run folder, and it reads for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradbalance as gb

from .config import Config
from .run_folder import RunFolder


def open_run_folder(
    path: str | Path, ranks: gb.distributed.Ranks, *, resume: bool = False, overwrite: bool = False
) -> RunFolder | SilentFolder:
    """The folder on rank 0, and on the others something that takes the same calls and does nothing.

    Only rank 0 needs a disk, or has to see this one.

    Args:
        path: As for :class:`~gradbalance_diffusers.run_folder.RunFolder`.
        ranks: That train together.
        resume: Likewise.
        overwrite: Likewise.
    """
    return SilentFolder(path) if ranks.rank > 0 else RunFolder(path, resume=resume, overwrite=overwrite)


class SilentFolder:
    """Takes what is written to a :class:`~gradbalance_diffusers.run_folder.RunFolder`, and keeps nothing.

    Args:
        path: Where the folder is on the machine of rank 0.

    >>> with SilentFolder("runs/tiny") as folder:
    ...     folder.log({"kind": "train"})
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write_config(self, config: Config) -> None:
        """Nothing."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def log_timing(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def save_evaluation(self, record: Mapping[str, Any], images: Mapping[int, Tensor]) -> None:
        """Nothing."""

    def __enter__(self) -> SilentFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def from_first_rank(value: Any, ranks: gb.distributed.Ranks) -> Any:
    """``value`` of rank 0, on every rank. Collective; what is sent is pickled, among the processes of one job.

    >>> from_first_rank({"epoch": 3}, gb.distributed.Ranks("average"))
    {'epoch': 3}
    """
    if not ranks.several:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=ranks.group)
    return box[0]


def wait_for_all(ranks: gb.distributed.Ranks) -> None:
    """Go on when every rank has come here. Collective."""
    gb.distributed.gather_samples(torch.zeros(1), ranks.group)


@torch.no_grad()
def copy_from_first_rank(tensors: Iterable[Tensor], ranks: gb.distributed.Ranks) -> None:
    """Let the tensors of every rank hold what those of rank 0 hold, in place. Collective."""
    if ranks.several:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0, group=ranks.group)
