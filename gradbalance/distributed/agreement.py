"""Before the first collective that could hang: do the ranks mean the same training?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbalance.distributed.collectives import carrier, exchange, fingerprint, gather
from gradbalance.distributed.ranks import Ranks
from gradbalance.errors import RanksError
from gradbalance.gradients.rows import is_sharded

_REMEDIES = {
    "objectives": "hand over every objective on every rank; a masked AffineLoss or 0.0 * output.sum() stands for one "
    "without samples",
    "ranks": "pass the same ranks= everywhere",
    "balancers": "build the same balancers on every rank",
    "arguments of the balancers": "build the same balancers on every rank",
    "options of BalancedOptimizer": "make it with the same arguments on every rank; an on_rows may do nothing on some",
    "settings of the optimizer": "make the same optimizer, with the same learning rates, on every rank",
    "rows are due": "load the same checkpoint on every rank",
    "states of the balancers": "load the same checkpoint on every rank",
    "parameters": "build the same model, with the same frozen parameters, on every rank",
    "values of the parameters": "start all ranks from one seed or checkpoint, or broadcast the parameters from rank 0",
}


def agree(
    names: Sequence[str], parameters: Sequence[Tensor], facts: Mapping[str, Any], ranks: Ranks
) -> tuple[str, ...]:
    """Compare what must be equal on all ranks. Two small collectives.

    Args:
        names: Objectives of this rank; they may come in another order.
        parameters: All that are trained, in order. Shapes, dtypes and values are compared (values of whole parameters
            only).
        facts: Further facts, plain values, by the name that the error gives them.
        ranks: That train together.

    Returns:
        The objectives in the order of rank 0.

    Raises:
        RanksError: On every rank; says what differs and on which ranks.
    """
    whole = [parameter for parameter in parameters if not is_sharded(parameter)]
    shapes = [f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in parameters]
    mine = {
        "ranks": ranks.mode,
        "objectives": sorted(names),
        "parameters": f"{len(shapes)} with {sum(p.numel() for p in parameters)} numbers, {_short(shapes)}",
        **facts,
        "values of the parameters": fingerprint(whole).item(),
        "order": list(names),
    }
    found = [json.loads(text) for text in exchange(json.dumps(mine), ranks.group, parameters[0].device)]
    for what, remedy in _REMEDIES.items():
        values = [other.get(what) for other in found]
        if any(value != values[0] for value in values):
            raise RanksError(f"ranks must agree on {what}, found {_listed(values)}: {remedy}.")
    return tuple(found[0]["order"])


def require_equal_gradients(parameters: Sequence[Tensor], ranks: Ranks) -> None:
    """Raise where ``.grad`` is not the same on all ranks, as it is after a reduction. One small collective.

    Raises:
        RanksError: On every rank.
    """
    if len(_distinct_fingerprints(parameters, ranks)) > 1:
        raise RanksError(
            "ranks='ddp' needs gradients that DistributedDataParallel has averaged, found different ones on the ranks "
            "after a backward pass: run the forward through the wrapped model (not .module), leave the last "
            "micro-batch of a cycle out of no_sync(), do not set static_graph=True, wrap every trained parameter; or "
            "pass ranks='average' without a wrapper."
        )


def require_unequal_gradients(parameters: Sequence[Tensor], losses: Tensor, ranks: Ranks) -> None:
    """Raise where ``.grad`` is the same on all ranks already although the losses differ. One small collective.

    Raises:
        RanksError: On every rank.
    """
    own = torch.cat([fingerprint(_gradients(parameters)), fingerprint([losses.detach()]).to(parameters[0].device)])
    every = _gathered(own, ranks)
    if len(set(every[:, 1].tolist())) > 1 and len(set(every[:, 0].tolist())) == 1 and every[0, 0] != 0:
        raise RanksError(
            "ranks='average' needs gradients of this rank alone, found the same ones on all ranks although their "
            "losses differ: something has averaged them already. Pass ranks='ddp' if the model is wrapped in "
            "DistributedDataParallel, or take the wrapper off."
        )


def _distinct_fingerprints(parameters: Sequence[Tensor], ranks: Ranks) -> set[int]:
    return set(_gathered(fingerprint(_gradients(parameters)), ranks).flatten().tolist())


def _gathered(own: Tensor, ranks: Ranks) -> Tensor:
    return gather(own.to(carrier(ranks.group, own.device)), ranks.group).cpu()


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _short(values: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:12]


def _listed(values: Sequence[Any]) -> str:
    """``A on ranks 0, 2 and B on rank 1``; long lists are cut."""
    places: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        places.setdefault(json.dumps(value), []).append(rank)
    told = []
    for value, ranks in list(places.items())[:4]:
        numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        told.append(f"{value} on rank{'s' if len(ranks) > 1 else ''} {numbers}")
    return "; ".join(told) + ("; and more" if len(places) > 4 else "")
