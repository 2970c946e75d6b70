"""Wrappers that keep gradients where no row can be collected: refused with the alternative, never wrong in silence."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gradbalance.errors import InvalidArgumentError, RanksError

_ALTERNATIVE = "fully_shard (FSDP2) with ranks='fsdp', DistributedDataParallel with ranks='ddp', or ranks='average'"
# By name: neither may be installed, and to import them takes seconds.
_MODULES = {
    "DeepSpeedEngine": "DeepSpeed reduces and holds gradients in buffers of its own",
    "FullyShardedDataParallel": "FSDP1 flattens parameters, so that they have no gradients of their own",
}
_PARAMETERS = {
    "ds_id": "is partitioned by DeepSpeed ZeRO-3",
    "_is_flat_param": "is a flat parameter of FSDP1",
}


def refuse_engine(module: nn.Module | None) -> None:
    """Raise where a module is a wrapper whose gradients cannot be collected.

    Raises:
        InvalidArgumentError: It is.
    """
    for kind in type(module).__mro__:
        if kind.__name__ in _MODULES:
            raise InvalidArgumentError(
                f"module must not be a {kind.__name__}: {_MODULES[kind.__name__]}, and rows cannot be collected. Use "
                f"{_ALTERNATIVE}."
            )


def refuse_engine_parameters(parameters: Iterable[Tensor]) -> None:
    """Raise where a parameter belongs to such a wrapper.

    Raises:
        RanksError: One does.
    """
    for place, parameter in enumerate(parameters):
        for mark, what in _PARAMETERS.items():
            if hasattr(parameter, mark):
                raise RanksError(
                    f"balanced parameters must be whole tensors or DTensors, found that number {place} {what}. Use "
                    f"{_ALTERNATIVE}."
                )
