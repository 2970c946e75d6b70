"""Every rank applies the same weights and remembers the same state, also where a balancer draws random numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.distributed.collectives import carrier, exchange, gather
from gradbalance.distributed.ranks import Ranks
from gradbalance.errors import RanksError
from gradbalance.solve import BalancerLike


def shared_weights(
    weights: Sequence[Tensor], asked: Sequence[BalancerLike], ranks: Ranks, device: torch.device
) -> list[Tensor]:
    """Those of rank 0, on every rank. One small all-gather.

    Every rank asks its own balancer with the same Gramian. A balancer without chance gives the same answer everywhere,
    but for rounding where processors differ; a random one gives the draw of rank 0. Where answers differ in any bit, a
    balancer with a state takes over that of rank 0 too, so that the steps that follow agree as well.

    Args:
        weights: [K] of each group on this rank, float64 on the CPU.
        asked: The balancers that gave them now.
        ranks: That share.
        device: Of the rows.

    Raises:
        RanksError: On every rank: the state of a balancer that answered differently is no plain data.
    """
    own = torch.stack(list(weights))
    every = gather(own.to(carrier(ranks.group, device)), ranks.group).cpu()
    if not torch.equal(every, every[:1].expand_as(every)):
        for balancer in asked:
            if hasattr(balancer, "load_state_dict"):
                _share_state(balancer, ranks, device)
    return list(every[0])


def _share_state(balancer: BalancerLike, ranks: Ranks, device: torch.device) -> None:
    try:
        text = json.dumps(balancer.state_dict())  # type: ignore[attr-defined]
    except TypeError:
        text = ""
    shared = exchange(text if ranks.rank == 0 else "", ranks.group, device)[0]
    if not shared:
        raise RanksError(
            f"balancer {type(balancer).__name__} gave different weights on the ranks for the same Gramian, and its "
            "state_dict is no plain data that the others could take over from rank 0: let it hold numbers, strings and "
            "lists, or seed it equally on all ranks."
        )
    if ranks.rank > 0:
        balancer.load_state_dict(json.loads(shared))  # type: ignore[attr-defined]
