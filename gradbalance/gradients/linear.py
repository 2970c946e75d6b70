"""Rows of an AffineLoss from M backward passes, whatever K: per-sample weight gradients contracted on the spot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradbalance.affine import AffineLoss
from gradbalance.errors import CollectorError
from gradbalance.gradients.graph import Graph
from gradbalance.gradients.passes import gradients
from gradbalance.gradients.record import resumed
from gradbalance.gradients.rows import Rows

# Elements of per-sample weight gradients alive at a time; larger layers go in chunks of samples.
_CHUNK = 1 << 24


def collect_linear(loss: AffineLoss, rows: Rows, graph: Graph, *, retain_graph: bool = False) -> float:
    """Add every objective's gradient to its row, in M backward passes.

    ``loss_k = sum_m sum_i C[k, m, i] T[m, i]`` makes row k a per-sample weighting of M gradients. Pass m runs backward
    from ``sum_i T[m, i]``, so the cotangent that reaches sample i's slice of a layer is that of T[m, i] alone, provided
    samples do not mix. A linear layer with input x and output cotangent d has the per-sample weight gradient
    ``W_i = sum_t d[i, t] x[i, t]^T`` and adds ``sum_i C[k, m, i] W_i`` to row k. Nothing per-sample outlives its layer.

    Pass m runs times a power of two near the largest coefficient, and C is divided by it: coefficients hold the 1/n of
    means, without which half-precision cotangents would be n times those of other steps and overflow.

    Rows equal those of :func:`collect_by_passes` to rounding, 1e-5 relative in float32 and 1e-10 in float64, with and
    without gradient checkpointing. Where layers run in bf16 or fp16 (autocast or parameters), W_i is a product in that
    dtype, as an ordinary weight gradient is, and its sum over samples is taken in float32: where a sample has several
    positions t, rows equal the float32 contraction of per-sample gradients from B separate passes to 1e-5; where it has
    one, the product is taken in float32 too and is the more exact of the two. `passes` rounds each row to that dtype
    instead and differs by this rounding, 2^-8 relative in bf16.

    Args:
        loss: The objectives.
        rows: To add to.
        graph: Of the same loss; every balanced parameter must be reached through recorded layers only.
        retain_graph: Keep the graph after the last pass.

    Returns:
        The coarsest machine epsilon of the layers' products: 2^-7 where one ran in bf16.

    Raises:
        CollectorError: A recorded input whose first dimension is not the batch; names the layer.
    """
    last, level = loss.terms.shape[0] - 1, _level(loss.coefficients)
    epsilon = 0.0
    try:
        with resumed(graph.recordings):
            for m in range(last + 1):
                contraction = _Contraction(loss.coefficients[:, m] / level, rows)
                for recording in graph.recordings:
                    recording.sink = contraction
                gradients(
                    loss.terms[m].sum() * level, rows.parameters, "the terms", retain_graph=retain_graph or m < last
                )
                epsilon = max(epsilon, contraction.epsilon)
    finally:
        for recording in graph.recordings:
            recording.sink = None
    return epsilon


def _level(coefficients: Tensor) -> Tensor:
    """A power of two near the largest absolute coefficient, 1 where there is none; it stays on its device."""
    if not coefficients.numel():
        return coefficients.new_ones(())
    largest = coefficients.abs().max()
    return torch.where(largest > 0, torch.exp2(torch.log2(largest).round()), 1.0)


class _Contraction:
    """Adds one layer's part of pass m to the rows.

    Args:
        coefficients: [K, B], C[:, m, :].
        rows: To add to.
    """

    def __init__(self, coefficients: Tensor, rows: Rows) -> None:
        self.coefficients = coefficients
        self.rows = rows
        self.epsilon = torch.finfo(torch.float64).eps

    def __call__(self, name: str, layer: nn.Linear, inputs: Tensor, cotangents: Tensor) -> None:
        batch = self.coefficients.shape[1]
        if inputs.shape[0] != batch:
            raise CollectorError(
                f"layer {name!r} was called with an input of shape {list(inputs.shape)} whose first dimension is not "
                f"the batch of {batch} samples, so its gradient cannot be split by sample; keep the batch first, or "
                "pass collector='passes'."
            )
        self.epsilon = max(self.epsilon, _product_epsilon(inputs.dtype))
        weight = self.rows.view(layer.weight) if layer.weight.requires_grad else None
        if weight is not None:
            add_weight_rows(weight, self.coefficients, inputs, cotangents)
        bias = self.rows.view(layer.bias) if layer.bias is not None and layer.bias.requires_grad else None
        if bias is not None:
            per_sample = cotangents.flatten(1, -2).sum(1, dtype=bias.dtype) if cotangents.dim() > 2 else cotangents
            bias.addmm_(self.coefficients.to(bias), per_sample.to(bias.dtype))


def add_weight_rows(rows: Tensor, coefficients: Tensor, inputs: Tensor, cotangents: Tensor) -> None:
    """``rows[k] += sum_i coefficients[k, i] * sum_t cotangents[i, t] inputs[i, t]^T``, flattened.

    Two ways, chosen by the number of multiplications per weight: per-sample products of T terms each and one K x B
    contraction, B (T + K), or K products over all samples with weighted cotangents, K B T.

    Args:
        rows: [K, out * in], float32 or float64, changed in place; may be a slice of a larger buffer.
        coefficients: [K, B].
        inputs: [B, in] or [B, ..., in].
        cotangents: [B, out] or [B, ..., out].

    >>> rows = torch.zeros(1, 2)
    >>> inputs, cotangents = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> add_weight_rows(rows, torch.tensor([[2.0, 1.0]]), inputs, cotangents)
    >>> rows
    tensor([[2., 3.]])
    """
    batch, objectives = inputs.shape[0], coefficients.shape[0]
    inputs, cotangents = _as_sequences(inputs), _as_sequences(cotangents)
    coefficients = coefficients.to(rows)
    width, steps = rows.shape[1], inputs.shape[1]
    if steps + objectives < objectives * steps:
        samples = max(1, _CHUNK // max(1, width))
        for start in range(0, batch, samples):
            part = slice(start, start + samples)
            per_sample = torch.bmm(cotangents[part].transpose(1, 2), inputs[part])
            rows.addmm_(coefficients[:, part], per_sample.flatten(1).to(rows.dtype))
        return
    flat = inputs.flatten(0, 1).to(rows.dtype)
    cotangents = cotangents.to(rows.dtype)
    for row, weights in zip(rows, coefficients, strict=True):
        weighted = (weights[:, None, None] * cotangents).flatten(0, 1)
        row.view(-1, flat.shape[1]).addmm_(weighted.T, flat)


def _product_epsilon(dtype: torch.dtype) -> float:
    """Machine epsilon of matrix products: TF32 or bf16 products of float32 tensors are a global setting of torch."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return torch.finfo(torch.bfloat16).eps
    return torch.finfo(dtype).eps


def _as_sequences(tensor: Tensor) -> Tensor:
    """[B, ..., d] as [B, T, d], T = 1 without a middle; B may be 0."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def check_row(loss: AffineLoss, rows: Rows, graph: Graph, epsilon: float) -> None:
    """Compare one row, fresh from :func:`collect_linear`, with ordinary backward passes. The graph is freed.

    The row taken is that of the active objective whose coefficients vary most over the samples: with equal coefficients
    even mixed samples give a right row. The reference is the sum of one backward pass per term, whose sizes say how
    much of the row has cancelled: rounding is relative to what was there before. (The terms of DiffusionNFT cancel
    wherever a sample's optimality is 1/2 and the policy has not moved yet.) A row that has cancelled to rounding says
    nothing; the next refresh is checked instead.

    Args:
        loss: The objectives.
        rows: Holding nothing but this loss's rows.
        graph: Of the same loss.
        epsilon: As returned by :func:`collect_linear`; it sets the tolerance, with the dtypes of the recorded modules'
            parameters: a half-precision base rounds what reaches float32 LoRA layers.

    Raises:
        CollectorError: A parameter's part differs by more than 1e-4 of its terms' gradients (5e-2 where half precision
            takes part); names the worst one.
    """
    spread = loss.coefficients.std((1, 2), correction=0) / loss.coefficients.abs().mean((1, 2)).clamp(min=1e-30)
    k, count = int(spread.argmax()), loss.terms.shape[0]
    found = rows.row(k)
    expected = [torch.zeros_like(f) for f in found]
    sizes = torch.zeros(len(found), dtype=torch.float64)
    with resumed(graph.recordings):
        for m in range(count):
            part = (loss.coefficients[k, m] * loss.terms[m]).sum()
            what = f"objective {loss.names[k]!r}"
            reference = gradients(part, rows.parameters, what, retain_graph=m < count - 1)
            for place, gradient in enumerate(reference):
                if gradient is not None:
                    expected[place] += gradient.reshape(-1).to(expected[place].dtype)
                    sizes[place] += gradient.norm().cpu().double()
    size, epsilon = sizes.norm(), max([epsilon, *_parameter_epsilons(graph)])
    if not torch.isfinite(size) or not all(torch.isfinite(f).all() for f in found):
        # Non-finite rows are the caller's to report, with the objective's name; the next step is checked instead.
        return
    # A part of the norm of the whole row is added: some gradients are zero but for rounding (the bias of attention
    # keys).
    errors = torch.stack(
        [
            (f - e).norm().cpu().double() / (part_size + 1e-2 * size + 1e-30)
            for f, e, part_size in zip(found, expected, sizes, strict=True)
        ]
    )
    if errors.max() > (5e-2 if epsilon > 1e-6 else 1e-4):
        worst = int(errors.argmax())
        raise CollectorError(
            f"rows of the linear collector disagree with a backward pass of objective {loss.names[k]!r}: "
            f"{parameter_name(rows.parameters[worst], graph, worst)} is off by {errors[worst]:.1e} relative. "
            "Something mixes the samples of a batch (batch normalization, contrastive terms) or the batch is not "
            "the first dimension of a layer's input; pass collector='passes'."
        )
    if torch.stack([e.norm().cpu().double() for e in expected]).norm() > 10 * epsilon * size:
        for recording in graph.recordings:
            recording.mark_checked()


def _parameter_epsilons(graph: Graph) -> list[float]:
    """Machine epsilons of the dtypes that the parameters of recorded modules have."""
    dtypes = {p.dtype for recording in graph.recordings for p in recording.module.parameters() if p.is_floating_point()}
    return [torch.finfo(dtype).eps for dtype in dtypes]


def parameter_name(parameter: Tensor, graph: Graph, place: int) -> str:
    """The name of a parameter in a recorded module, or its place in ``params`` and shape."""
    for recording in graph.recordings:
        for name, candidate in recording.module.named_parameters():
            if candidate is parameter:
                return repr(name)
    return f"parameter {place} of shape {list(parameter.shape)}"
