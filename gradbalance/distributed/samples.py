"""For losses and logs: counts, samples and numbers of all ranks; without a process group, of this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gradbalance.distributed.collectives import carrier, exchange, gather, sum_
from gradbalance.distributed.ranks import world_size
from gradbalance.errors import InvalidArgumentError, RanksError


def global_counts(mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """For how many samples of all ranks is each objective defined? The ``counts`` of an AffineLoss.

    Ranks average their losses, so a mean over the valid samples of all ranks is, on each rank, ``W / n_k`` times the
    sum over its own. ``AffineLoss`` does this when it is told both:

        counts = global_counts(mask)
        loss = AffineLoss.interpolate(positive, negative, r, mask, counts, world_size=ranks.size)

    With losses of another kind multiply by hand:
    ``ranks.size * (mask[:, k] * per_sample).sum() / counts[k].clamp(min=1)``. A rank without a valid sample of an
    objective contributes zero and takes part all the same.

    Args:
        mask: bool [B, K], all samples of this rank in the cycle (micro-batches concatenated); True where defined. Ranks
            may have different B, also 0.
        group: The ranks; None for the default group.

    Returns:
        int64 [K] on the device of ``mask``, the same on every rank.

    Raises:
        InvalidArgumentError: Not bool, or not of two dimensions.

    >>> global_counts(torch.tensor([[True, False], [True, True]]))
    tensor([2, 1])
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise InvalidArgumentError(
            f"mask must be a bool tensor of shape [B, K], found {mask.dtype} of shape {list(mask.shape)}."
        )
    counts = mask.sum(0)
    if world_size(group) == 1:
        return counts
    return sum_(counts.to(carrier(group, mask.device)), group).to(mask.device)


def gather_samples(samples: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate the samples of all ranks along the first dimension, in the order of the ranks.

    Ranks may have different numbers of samples, also none. Not differentiable. Two collectives.

    Args:
        samples: [B, ...]; dtype and all dimensions but the first the same on every rank.
        group: The ranks; None for the default group.

    Returns:
        [sum of all B, ...] on the device of ``samples``, the same on every rank.

    Raises:
        InvalidArgumentError: A tensor without dimensions.
        RanksError: On every rank: shapes or dtypes differ.

    >>> gather_samples(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.]])
    """
    if samples.dim() == 0:
        raise InvalidArgumentError(
            "samples must have a first dimension, found a tensor without any; pass samples[None]."
        )
    samples = samples.detach()
    if world_size(group) == 1:
        return samples.clone()
    device = carrier(group, samples.device)
    kind = f"{samples.dtype} {list(samples.shape[1:])}"
    digest = int(hashlib.sha256(kind.encode()).hexdigest()[:12], 16)
    told = gather(torch.tensor([len(samples), digest], device=device), group).tolist()
    if any(other != digest for _, other in told):
        found = exchange(kind, group, device)
        raise RanksError(
            f"ranks must gather samples of one dtype and shape (but for their number), found {found}; a rank without "
            "any passes an empty tensor such as torch.empty(0, K)."
        )
    lengths = [length for length, _ in told]
    # bool is no number to every backend.
    wire = samples.to(device, torch.uint8 if samples.dtype == torch.bool else samples.dtype)
    padded = wire.new_zeros(max(lengths), *samples.shape[1:])
    padded[: len(samples)] = wire
    parts = [own[:length] for own, length in zip(gather(padded, group), lengths, strict=True)]
    return torch.cat(parts).to(samples.device, samples.dtype)


def mean_metrics(values: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Average numbers to log over the ranks that have them, on any keys.

    A key that only some ranks have, and a NaN, count for nothing on the others: no rank waits for a key that does not
    come. All ranks have to call this equally often. Two small collectives.

    Args:
        values: Name -> number.
        group: The ranks; None for the default group.

    Returns:
        Every name of any rank, sorted, with the mean over ranks where it is not NaN; NaN if it is everywhere.

    >>> mean_metrics({"b": 1.0, "a": True})
    {'a': 1.0, 'b': 1.0}
    """
    mine = {name: float(value) for name, value in values.items()}
    found = [mine]
    if world_size(group) > 1:
        found = [json.loads(text) for text in exchange(json.dumps(mine), group, torch.device("cpu"))]
    names = sorted({name for numbers in found for name in numbers})
    known = {name: [own[name] for own in found if name in own and own[name] == own[name]] for name in names}
    return {name: sum(numbers) / len(numbers) if numbers else float("nan") for name, numbers in known.items()}
