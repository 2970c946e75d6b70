"""Collectives over flat buffers: few, large, of a bounded size, and none per tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradbalance.gradients.rows import flat, local, replace

# Elements that are copied together for one collective: 256 MiB of float32, enough to be bound by bandwidth.
BUCKET = 1 << 26
# gloo has a reduce-scatter in name: an all-reduce of everything and a copy (torch 2.13). MPI has none.
_WITHOUT_REDUCE_SCATTER = ("gloo", "mpi", "ucc")


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Kind of device -> name of the backend that serves it."""
    found: dict[str, str] = {}
    for pair in str(dist.get_backend_config(group)).split(","):
        device, _, name = pair.partition(":")
        found[device] = name
    return found


def scatters_natively(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Does a reduce-scatter on this device move fewer bytes than an all-reduce?"""
    return backends(group).get(device.type, "gloo") not in _WITHOUT_REDUCE_SCATTER


def carrier(group: dist.ProcessGroup | None, preferred: torch.device) -> torch.device:
    """A device whose tensors the group can send: the preferred one if it is served, else one that is."""
    served = backends(group)
    if preferred.type in served:
        return preferred
    kind = next(iter(served))
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def sum_(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks, in place, the same on all."""
    dist.all_reduce(tensor, group=group)
    return tensor


def gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[W, ...]: the tensors of all ranks, which have one shape and dtype, in the order of the ranks."""
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    # Older releases of torch know it under its long name only, newer ones warn of that.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(gathered.view(-1), tensor.contiguous().view(-1), group=group)
    return gathered


def reduce_scatter(pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Of contiguous pieces [W, ...] the sum over ranks of the piece that has this rank's number."""
    own = torch.empty_like(pieces[0])
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(own.view(-1), pieces.view(-1), group=group)
    return own


def everywhere(fact: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Is it so on every rank?"""
    return sum_(torch.tensor([not fact], dtype=torch.int64, device=carrier(group, device)), group).item() == 0


def exchange(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """The texts of all ranks, in their order. Two small collectives."""
    device = carrier(group, device)
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = gather(torch.tensor([len(data)], device=device), group).flatten().tolist()
    padded = data.new_zeros(max(lengths))
    padded[: len(data)] = data
    rows = gather(padded, group).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def mean_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Average ``.grad`` over ranks in place, where None counts as zero; afterwards every parameter has one.

    Sums are taken in float32 (float64 if a parameter of the bucket is), whatever the dtype of the gradients. Sparse
    gradients become dense.

    Args:
        parameters: The same ones in the same order on every rank.
        group: The ranks.
    """
    world = dist.get_world_size(group)
    for bucket in _buckets(parameters):
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in bucket) else torch.float32
        joined = torch.cat([flat_gradient(parameter, dtype) for parameter in bucket])
        sum_(joined, group).div_(world)
        for parameter, part in zip(bucket, torch.split(joined, [p.numel() for p in bucket]), strict=True):
            write(parameter, part.view(parameter.shape))


def flat_gradient(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """``.grad`` as one dimension, zeros where there is none."""
    if parameter.grad is None:
        return parameter.new_zeros(parameter.numel(), dtype=dtype, requires_grad=False)
    return flat(parameter.grad).to(dtype)


def write(parameter: Tensor, gradient: Tensor) -> None:
    """Let ``.grad`` hold these values, in the memory it has if there is any: wrappers may keep views of that."""
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        replace(parameter, gradient)
    else:
        parameter.grad.detach().copy_(gradient)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one device, in their order, up to BUCKET elements at a time; a larger one by itself."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        full = size + parameter.numel() > BUCKET
        if bucket and (full or parameter.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [1]: equal bits give equal numbers on any device, unequal ones different numbers almost surely.

    The bits are added up as integers, so that the order in which a device adds them does not matter. None of the
    tensors crosses to the host.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros(1, dtype=torch.int64, device=tensors[0].device if tensors else None)
    for place, tensor in enumerate(tensors, start=1):
        own = local(tensor.detach())
        own = own.to_dense() if own.layout != torch.strided else own
        if own.numel():
            total += place * own.contiguous().view(integers[own.element_size()]).sum(dtype=torch.int64).to(total.device)
    return total
