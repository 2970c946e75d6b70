"""The rows: K gradients over P parameters, summed over micro-batches, and the way back to ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, NonFiniteError
from gradbalance.gramian import gramian

# Norms of rows in float32 below which their weights, of size 1 / norm or longest / norm, might not fit into it.
_FAINT, _FAINTER_THAN_LONGEST = 1e-32, 1e-36


class Rows:
    """K x P gradients in one flat buffer per device and group of parameters.

    Each block is [K, P_block], float64 if any of its parameters is float64 and float32 otherwise, whatever the
    parameters' own dtype: sums over micro-batches and samples keep float32 accuracy for bf16 and fp16 models. Of a
    sharded parameter (DTensor) the columns are those of this rank's shard.

    Args:
        parameters: Distinct leaf tensors that require grad.
        objectives: K.
        groups: The group of each parameter, a number from 0: groups have Gramians and weights of their own. None: one
            group.

    Attributes:
        parameters: As given.
        reached: Places of the parameters that some gradient reached.
        blocks: The buffers.
        groups: The group of each block.
        members: Places of the parameters side by side in each block.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> rows = Rows([weight], objectives=2)
    >>> rows.add(0, [torch.tensor([3.0, 0.0])]); rows.add(1, [torch.tensor([0.0, 2.0])])
    >>> rows.gramian().tolist()
    [[9.0, 0.0], [0.0, 4.0]]
    >>> rows.add_to_grad(torch.tensor([1.0, 0.5]))
    >>> weight.grad
    tensor([3., 1.])
    """

    def __init__(self, parameters: Sequence[Tensor], objectives: int, groups: Sequence[int] | None = None) -> None:
        self.parameters = tuple(parameters)
        self.reached: set[int] = set()
        self._place = {id(parameter): j for j, parameter in enumerate(self.parameters)}
        members: dict[tuple[int, torch.device], list[int]] = {}
        for j, parameter in enumerate(self.parameters):
            members.setdefault((groups[j] if groups else 0, parameter.device), []).append(j)
        self.blocks: list[Tensor] = []
        self._views: dict[int, Tensor] = {}
        self.groups = [group for group, _ in members]
        self.members = list(members.values())
        for (_, device), indices in members.items():
            sizes = [local(self.parameters[j]).numel() for j in indices]
            wide = any(self.parameters[j].dtype == torch.float64 for j in indices)
            block = torch.zeros(objectives, sum(sizes), device=device, dtype=torch.float64 if wide else torch.float32)
            self.blocks.append(block)
            self._views.update(zip(indices, torch.split(block, sizes, dim=1), strict=True))

    def view(self, parameter: Tensor) -> Tensor | None:
        """The [K, numel] part of the buffer that belongs to ``parameter``, to be added to in place; None: it has none.

        The parameter counts as reached from then on.
        """
        j = self._place.get(id(parameter))
        if j is None:
            return None
        self.reached.add(j)
        return self._views[j]

    def add(self, objective: int, gradients: Iterable[Tensor | None]) -> None:
        """Add one gradient per parameter (None: not reached) to row ``objective``."""
        for j, gradient in enumerate(gradients):
            if gradient is not None:
                self.reached.add(j)
                self._views[j][objective].add_(flat(gradient))

    def row(self, objective: int) -> list[Tensor]:
        """Row ``objective`` as flat views, one per parameter."""
        return [self._views[j][objective] for j in range(len(self.parameters))]

    def gramian(self, group: int = 0) -> Tensor:
        """``rows @ rows.T`` over the blocks of a group: float64 [K, K] on the CPU. One host transfer per block."""
        return gramian([block for block, its in zip(self.blocks, self.groups, strict=True) if its == group])

    def gramians(self) -> Tensor:
        """:meth:`gramian` of each group, [G, K, K]. Their sum is that of whole rows."""
        return torch.stack([self.gramian(group) for group in range(max(self.groups) + 1)])

    def add_to_grad(self, *weights: Tensor) -> None:
        """Add ``sum_k weights_k * row_k`` to ``.grad``, with weights [K] for each group.

        A new ``.grad`` has the dtype, shape and strides of its parameter. Parameters that no loss reached keep theirs
        untouched: None stays None, so that weight decay and momentum leave them alone, as after ``loss.backward()``.
        """
        for block, group, indices in zip(self.blocks, self.groups, self.members, strict=True):
            with torch.autocast(block.device.type, enabled=False):
                combined = weights[group].to(block) @ block
            for j, part in zip(indices, parts(combined, [self.parameters[j] for j in indices]), strict=True):
                if j in self.reached:
                    accumulate(self.parameters[j], part)


def parts(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector over parameters side by side as one tensor for each, in its shape (that of this rank's shard)."""
    own = [local(parameter) for parameter in parameters]
    pieces = torch.split(vector, [tensor.numel() for tensor in own])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, own, strict=True)]


def is_sharded(tensor: Tensor) -> bool:
    """Does each rank hold a part of it, as a DTensor? Importing that class takes time that most processes can save."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """The shard of a sharded tensor that this rank holds, sharing its memory; another tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def flat(gradient: Tensor) -> Tensor:
    """A gradient, this rank's part of it if it is sharded, as one dense dimension."""
    own = local(gradient.detach())
    return (own.to_dense() if own.layout != torch.strided else own).reshape(-1)


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``parameter.grad`` as ``backward()`` would; a new one has the parameter's dtype and strides.

    For a sharded parameter ``gradient`` is that of this rank's shard.
    """
    if parameter.grad is None:
        replace(parameter, gradient)
    else:
        # detach: with create_graph elsewhere .grad may itself be part of a graph.
        parameter.grad = parameter.grad.detach()
        local(parameter.grad).add_(gradient)


def replace(parameter: Tensor, gradient: Tensor) -> None:
    """Make ``gradient`` the ``.grad`` of ``parameter``, in memory of its own with the parameter's dtype and strides."""
    parameter.grad = torch.empty_like(parameter, requires_grad=False)
    local(parameter.grad).copy_(gradient)


def without_faint_rows(grams: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Gramians in which rows that all but vanish are zero: objectives without signal, as of a saturated loss.

    Rows in float32 with a norm below 1e-32, or below 1e-36 of the longest, would need weights that float32 cannot hold,
    and ``.grad`` would be infinite. Rows in float64 stay, and so do all where one is not finite.

    Args:
        grams: float64 [..., K, K], one or several.
        blocks: The rows.

    >>> without_faint_rows(torch.diag(torch.tensor([4.0, 1e-80], dtype=torch.float64)), [torch.zeros(2, 1)]).tolist()
    [[4.0, 0.0], [0.0, 0.0]]
    """
    squared = grams.diagonal(dim1=-2, dim2=-1)
    if all(block.dtype == torch.float64 for block in blocks) or not torch.isfinite(squared).all():
        return grams
    longest = squared.max(-1, keepdim=True).values
    kept = squared > (_FAINTER_THAN_LONGEST**2 * longest).clamp(min=_FAINT**2)
    return torch.where(kept[..., :, None] & kept[..., None, :], grams, 0.0)


def require_finite_rows(gram: Tensor, names: Sequence[str]) -> None:
    """Raise where a row holds NaN or Inf, seen on the diagonal of its Gramian.

    Raises:
        NonFiniteError: Names the objectives.
    """
    bad = non_finite_rows(gram, names)
    if bad:
        raise NonFiniteError(
            f"gradients of objectives {list(bad)} hold NaN or Inf. The balanced gradient was not written and the "
            "balancer was not called. With a GradScaler, hand it over as BalancedOptimizer(..., scaler=scaler) so that "
            'overflows skip the step; without one, on_nonfinite="skip" does.',
            bad,
        )


def non_finite_rows(gram: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """Names of the objectives whose row holds NaN or Inf, seen on the diagonal of the Gramian."""
    finite = torch.isfinite(gram.diagonal()).tolist()
    return tuple(name for name, good in zip(names, finite, strict=True) if not good)


def gradients_are_finite(parameters: Iterable[Tensor]) -> bool:
    """Is every ``.grad`` finite? One host transfer per device."""
    answers: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad.detach())
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            answers.setdefault(gradient.device, []).append(torch.isfinite(values).all())
    return all(bool(torch.stack(found).all()) for found in answers.values())


def balanced_parameters(params: Iterable[Tensor] | Tensor) -> tuple[Tensor, ...]:
    """The parameters to balance: those of ``params`` that require grad.

    Frozen ones are left out, as torch optimizers do with them.

    Raises:
        InvalidArgumentError: None left, given twice, not a tensor, not a leaf.
    """
    if isinstance(params, Tensor):
        raise InvalidArgumentError(
            "params must be an iterable of tensors, found one tensor; put it in a list: [tensor]."
        )
    given = tuple(params)
    for j, parameter in enumerate(given):
        if not isinstance(parameter, Tensor):
            raise InvalidArgumentError(
                f"params must hold tensors, found {type(parameter).__name__} at place {j}; pass module.parameters()."
            )
    trainable = tuple(parameter for parameter in given if parameter.requires_grad)
    if not trainable:
        found = f"found {len(given)}, all frozen" if given else "found none at all"
        raise InvalidArgumentError(
            f"params must hold at least one tensor that requires grad, {found}; an iterator such as "
            "module.parameters() can be read only once, and LoRA adapters are trainable only while they are active."
        )
    if not all(parameter.is_leaf for parameter in trainable):
        raise InvalidArgumentError("params must be leaf tensors (parameters), found the result of an operation.")
    if len({id(parameter) for parameter in trainable}) != len(trainable):
        raise InvalidArgumentError("params must be distinct, found the same tensor twice; list each parameter once.")
    return trainable
