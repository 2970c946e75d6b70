"""The processes that train one model together, and who averages the gradients of their ordinary backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch.distributed as dist
from torch import Tensor

from gradbalance.distributed.engines import refuse_engine_parameters
from gradbalance.errors import InvalidArgumentError, RanksError
from gradbalance.gradients.rows import is_sharded

Mode: TypeAlias = Literal["average", "ddp", "fsdp", "alone"]
Reduction: TypeAlias = Literal["auto", "reduce_scatter", "all_reduce"]

_REMEDY = (
    "pass ranks='average' to let gradbalance average the gradients (no wrapper needed; enough for LoRA), ranks='ddp' "
    "if the model is wrapped in DistributedDataParallel, ranks='fsdp' after fully_shard, or ranks='alone' if every "
    "rank trains a model of its own"
)


@dataclass(frozen=True)
class Ranks:
    """How several processes train one model: what :class:`~gradbalance.BalancedOptimizer` takes as ``ranks``.

    With W ranks, objective k is the **mean over ranks** of what each rank hands over as its loss k, as under
    DistributedDataParallel: ``L_k = (1/W) sum_r L_k^r``. Row k is the gradient of that mean. So a rank gives the mean
    over its own samples if all ranks have as many; see :func:`global_counts` where they do not.

    On a refresh rows are averaged over ranks before the Gramian is taken, whatever the mode but ``"alone"``, and
    every rank applies the same weights. The mode says who averages ordinary backward passes (steps between
    refreshes):

    * ``"average"``: gradbalance does, once at the end of a cycle. The model is not wrapped; its parameters must start
      equal on all ranks, which the first cycle checks.
    * ``"ddp"``: DistributedDataParallel does, and nothing is averaged twice. With several micro-batches, put forward
      *and* ``backward`` of all but the last under ``no_sync()``, as in plain training. ``static_graph=True`` is not
      supported: refreshes fire none of the hooks that it counts.
    * ``"fsdp"``: FSDP2 (``fully_shard``) does. Parameters are DTensors, and rows stay sharded.
    * ``"alone"``: nobody; every rank trains a model of its own.

    Without a process group, or with one of a single rank, the first two and the last are the same: one script serves
    one process and many.

    Args:
        mode: See above.
        group: The process group of these ranks; None for the default one.
        reduction: How rows are averaged: ``"reduce_scatter"``, ``"all_reduce"`` (about twice the bytes), or ``"auto"``:
            the first, except on backends without one of their own (MPI; gloo emulates it by an all-reduce).

    Raises:
        InvalidArgumentError: An unknown mode or reduction.

    >>> Ranks("average").size  # no process group here
    1
    """

    mode: Mode
    group: dist.ProcessGroup | None = None
    reduction: Reduction = "auto"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InvalidArgumentError(f"ranks must be one of {get_args(Mode)}, found {self.mode!r}.")
        if self.reduction not in get_args(Reduction):
            raise InvalidArgumentError(f"reduction must be one of {get_args(Reduction)}, found {self.reduction!r}.")

    @property
    def size(self) -> int:
        """W, the number of ranks that train together; 1 without a process group."""
        return 1 if self.mode == "alone" else world_size(self.group)

    @property
    def rank(self) -> int:
        """The place of this process in the group, from 0; 0 without one."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    @property
    def several(self) -> bool:
        """Is there anybody to agree with?"""
        return self.size > 1


RanksLike: TypeAlias = Ranks | Mode | None


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in the group; 1 where no process group runs."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def as_ranks(given: RanksLike) -> Ranks | None:
    """A mode's name as :class:`Ranks`; the rest as it is.

    Raises:
        InvalidArgumentError: Anything else.
    """
    if given is None or isinstance(given, Ranks):
        return given
    if not isinstance(given, str):
        raise InvalidArgumentError(
            f"ranks must be gradbalance.distributed.Ranks, one of {get_args(Mode)}, or None, found "
            f"{type(given).__name__}."
        )
    return Ranks(given)


def resolved(ranks: Ranks | None, parameters: Sequence[Tensor]) -> Ranks:
    """What ``ranks`` means for these parameters, at the start of a cycle.

    Args:
        ranks: As given by the user.
        parameters: The balanced ones.

    Raises:
        RanksError: Several ranks run and nothing was said; sharded parameters without ``"fsdp"``, the other way round,
            or sharded along more than one dimension of a mesh; parameters of a wrapper that hides gradients.
    """
    refuse_engine_parameters(parameters)
    sharded = sum(is_sharded(parameter) for parameter in parameters)
    if ranks is None:
        if (found := world_size()) > 1:
            raise RanksError(
                f"ranks must be given where a process group of several ranks runs, found {found} ranks and none given: "
                f"each would balance its own batch and the models would drift apart. To choose, {_REMEDY}."
            )
        ranks = Ranks("fsdp" if sharded else "alone")
    if sharded and ranks.mode != "fsdp":
        raise RanksError(
            f"ranks={ranks.mode!r} takes whole parameters, found {sharded} of {len(parameters)} sharded (DTensor): "
            "pass ranks='fsdp'."
        )
    if ranks.mode == "fsdp" and sharded < len(parameters):
        raise RanksError(
            f"ranks='fsdp' takes parameters sharded by fully_shard, found {len(parameters) - sharded} of "
            f"{len(parameters)} that are not: call fully_shard on the whole model before the optimizer is made, and "
            f"read module.parameters() before a forward, which puts gathered copies in their place; or {_REMEDY}."
        )
    for parameter in parameters if sharded else ():
        kinds = [type(placement).__name__ for placement in parameter.placements]  # type: ignore[attr-defined]
        mesh = parameter.device_mesh.size()  # type: ignore[attr-defined]
        if kinds != ["Shard"] or mesh != ranks.size:
            raise RanksError(
                f"ranks='fsdp' takes parameters sharded along one mesh dimension over all {ranks.size} ranks, found "
                f"placements {kinds} over {mesh}: partial Gramians of copies or tensor-parallel parts do not add up. "
                "Use fully_shard with a mesh of one dimension, and its group in Ranks('fsdp', group)."
            )
    return ranks
