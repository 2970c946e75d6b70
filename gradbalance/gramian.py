"""Facts about K row vectors that their K x K Gramian holds: norms, cosines, the angles of a combination. No state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError

# Elements of the float64 copy of a chunk: 1 MiB stays in the cache of a CPU core, 128 MiB are little for a GPU.
_CPU_CHUNK = 1 << 17
_GPU_CHUNK = 1 << 24


def gramian(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Gramian ``G[i, j] = <g_i, g_j>`` of K rows g.

    Products are formed and added in float64, whatever the dtype of the rows, chunk by chunk along P: no K x P float64
    copy is made, and row norms that differ by 1e+-30 (more than float32 rows can hold) leave every entry correct to
    about 1e-15 of |g_i| |g_j|. The K x K result crosses to the host once per block.

    Args:
        rows: The rows, shape [K, P], of any floating dtype; or a sequence of blocks [K, P_j] (parameters on several
            devices, or of several dtypes) that side by side make up the rows. Their Gramians add.

    Returns:
        G, shape [K, K], float64, on the CPU, exactly symmetric. Non-finite rows give non-finite entries, not an error.

    Raises:
        InvalidArgumentError: A block is not a real floating tensor of two dimensions, K differs, or there is no block.

    Example:
        >>> gramian(torch.tensor([[3.0, 4.0], [0.0, 1e-30]]))
        tensor([[2.5000e+01, 4.0000e-30],
                [4.0000e-30, 1.0000e-60]], dtype=torch.float64)
    """
    blocks = [rows] if isinstance(rows, Tensor) else list(rows)
    if not blocks:
        raise InvalidArgumentError("`rows` should hold at least one block of shape [K, P]. Found an empty sequence.")
    for block in blocks:
        if block.dim() != 2 or not block.is_floating_point() or block.shape[0] != blocks[0].shape[0]:
            raise InvalidArgumentError(
                f"`rows` should be floating tensors of shape [K, P], K the same in all blocks. Found {block.dtype} of "
                f"shape {tuple(block.shape)} beside {tuple(blocks[0].shape)}. Flatten each parameter's gradient to one "
                "dimension per objective."
            )
    total = torch.zeros(blocks[0].shape[0], blocks[0].shape[0], dtype=torch.float64)
    for block in blocks:
        total += _block_gramian(block.detach()).cpu()
    return (total + total.T) / 2


def _block_gramian(block: Tensor) -> Tensor:
    count, width = block.shape
    # MPS has no float64; its memory is the host's, so the chunks are multiplied there.
    device = torch.device("cpu") if block.device.type == "mps" else block.device
    step = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // max(1, count))
    total = torch.zeros(count, count, dtype=torch.float64, device=device)
    for start in range(0, width, step):
        chunk = block[:, start : start + step].to(device=device, dtype=torch.float64)
        # Not by numpy, which computes half of a symmetric product: its threads and torch's wait for each other, and
        # where the cores are shared that takes tens of times as long.
        total.addmm_(chunk, chunk.T)
    return total


def norms(gram: Tensor) -> Tensor:
    """Row norms ``|g_k| = sqrt(G[k, k])``.

    Args:
        gram: Gramian, shape [K, K], any floating dtype and device.

    Returns:
        Norms, shape [K], float64, on the CPU. A diagonal entry below zero (rounding of a zero row) counts as zero.

    Example:
        >>> norms(torch.tensor([[25.0, 0.0], [0.0, 4.0]]))
        tensor([5., 2.], dtype=torch.float64)
    """
    return _host(gram).diagonal().clamp(min=0).sqrt()


def cosines(gram: Tensor) -> Tensor:
    """Cosines ``C[i, j] = G[i, j] / (|g_i| |g_j|)``: the Gramian of the rows scaled to unit length.

    Args:
        gram: Gramian, shape [K, K], any floating dtype and device.

    Returns:
        C, shape [K, K], float64, on the CPU, entries in [-1, 1]. The diagonal is exactly 1 where the row is not zero. A
        zero row has no direction: its row and column are 0, the diagonal included, so the diagonal tells which rows
        exist.

    Example:
        >>> cosines(torch.tensor([[4.0, -3.0, 0.0], [-3.0, 9.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([[ 1.0000, -0.5000,  0.0000],
                [-0.5000,  1.0000,  0.0000],
                [ 0.0000,  0.0000,  0.0000]], dtype=torch.float64)
    """
    host = _host(gram)
    length = norms(host)
    valid = length > 0
    inverse = torch.where(valid, 1 / length, 0.0)
    cosine = (host * inverse[:, None] * inverse).clamp(-1, 1)
    return cosine.fill_diagonal_(0) + torch.diag(valid.to(torch.float64))


def direction_cosines(gram: Tensor, weights: Tensor) -> Tensor:
    """Cosine of the combined direction ``d = sum_k w_k g_k`` with every row, from the Gramian alone.

    With the cosine matrix C and ``u_k = w_k |g_k|`` (rescaled, so nothing over- or underflows),

        cos(d, g_k) = (C u)_k / sqrt(u' C u).

    Args:
        gram: Gramian, shape [K, K], any floating dtype and device.
        weights: w, the weights on the raw rows, shape [K].

    Returns:
        Cosines, shape [K], float64, on the CPU; 0 for a zero row. All are 0 where d vanishes to rounding, that is where
        |d| is under 1e-7 of sum_k |w_k| |g_k|: its direction is then noise of the Gramian's own rounding.

    Example:
        >>> direction_cosines(torch.eye(2), torch.tensor([1.0, 1.0]))
        tensor([0.7071, 0.7071], dtype=torch.float64)
    """
    length = norms(gram)
    scaled = _host(weights) * (length / length.max().clamp(min=torch.finfo(torch.float64).tiny))
    scaled = scaled / scaled.abs().sum().clamp(min=torch.finfo(torch.float64).tiny)
    image = cosines(gram) @ scaled
    squared = torch.dot(scaled, image)
    if squared <= 1e-14:
        return torch.zeros_like(image)
    return (image / squared.sqrt()).clamp(-1, 1)


def joint_cosines(grams: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Cosines of a direction whose parts, in separate groups of columns, combine the rows with weights of their own.

    With groups h of columns, Gramians G_h and weights w_h, and ``d_h = sum_k w_hk g_hk`` side by side,

        cos(d, g_k) = sum_h (G_h w_h)_k / sqrt(sum_h w_h' G_h w_h  sum_h G_h[k, k]).

    Args:
        grams: A Gramian for each group, shape [K, K], any floating dtype and device.
        weights: Weights on its raw rows, shape [K], for each group.

    Returns:
        Cosines as of :func:`direction_cosines`, which this is for a single group.

    Example:
        >>> joint_cosines([torch.eye(2), torch.eye(2)], [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    tiny = torch.finfo(torch.float64).tiny
    total = torch.stack([_host(gram) for gram in grams]).sum(0)
    length = norms(total)
    # The largest |w_hk| |g_hk| is brought to 1 before anything is squared.
    parts = [(norms(gram), _host(own)) for gram, own in zip(grams, weights, strict=True)]
    largest = torch.stack([(size * own).abs().max() for size, own in parts]).max().clamp(min=tiny)
    image = torch.zeros_like(length)
    squared = mass = 0.0
    for gram, (size, own) in zip(grams, parts, strict=True):
        scaled = own * size / largest
        products = cosines(gram) @ scaled
        image += products * torch.where(length > 0, size / length.clamp(min=tiny), 0.0)
        squared += float(scaled @ products)
        mass += float(scaled.abs().sum())
    if squared <= 1e-14 * mass**2:
        return torch.zeros_like(image)
    return (image / math.sqrt(squared)).clamp(-1, 1)


def _host(values: Tensor) -> Tensor:
    return values.detach().to(device="cpu", dtype=torch.float64)
