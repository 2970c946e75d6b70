"""Recording: linear layers that keep what per-sample weight gradients need, for the forward of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Sink(Protocol):
    """Receives, during a backward pass, what weight gradients of one recorded call are made of."""

    def __call__(self, name: str, layer: nn.Linear, inputs: Tensor, cotangents: Tensor) -> None:
        """Input [B, ..., in] and output cotangent [B, ..., out] of one call of ``layer``."""


class Recording:
    """The linear layers of a module, and where their weight gradients go during a backward pass.

    A recorded layer computes what it always computes, through an autograd Function that saves its input with
    ``save_for_backward``: non-reentrant gradient checkpointing keeps its savings, and an ordinary backward gives
    ordinary gradients. While ``sink`` is set, backward passes hand input and output cotangent to it and give no weight
    gradient.

    Only layers whose forward is that of ``nn.Linear`` are recorded, and of those only calls with grad enabled through a
    trainable weight or bias, so frozen layers and forwards under ``no_grad`` run as if nothing was there.

    Attributes:
        module: As given.
        layers: Name to layer.
        sink: Set by the collector for the time of its passes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        }
        self.sink: Sink | None = None
        self._installed: list[nn.Linear] = []

    def install(self) -> None:
        """Record forwards from now on. A layer whose forward was replaced, by another recording too, is left alone."""
        for name, layer in self.layers.items():
            # The instance attribute shadows the class's forward; module hooks still run around it.
            if "forward" not in layer.__dict__:
                layer.__dict__["forward"] = self._recorded_forward(name, layer)
                self._installed.append(layer)

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for layer in self._installed:
            del layer.__dict__["forward"]
        self._installed.clear()

    @property
    def installed(self) -> bool:
        """Are forwards being recorded?"""
        return bool(self._installed)

    @property
    def checked(self) -> bool:
        """Were rows of this module compared with the reference before?"""
        return self.module in _checked

    def mark_checked(self) -> None:
        """Remember that a row of this module agreed with the reference."""
        _checked.add(self.module)

    def _recorded_forward(self, name: str, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            weight, bias = layer.weight, layer.bias
            trainable = weight.requires_grad or (bias is not None and bias.requires_grad)
            if not trainable or not torch.is_grad_enabled() or input.dim() < 2 or torch.compiler.is_compiling():
                return nn.functional.linear(input, weight, bias)
            output: Tensor = RecordedLinear.apply(input, weight, bias, self, name, layer)  # type: ignore[no-untyped-call]
            return output

        return forward


_checked: WeakSet[nn.Module] = WeakSet()


@contextmanager
def record(module: nn.Module) -> Iterator[None]:
    """Record the forward of a step whose rows are wanted by the `linear` collector.

    Args:
        module: Its ``nn.Linear`` layers, at any depth, are recorded. PEFT's LoRA factors are such layers.

    Put the forward inside, and everything else outside. Gradient checkpointing recomputes layers during the backward,
    after this context has ended: ``backward`` switches recording on again for the passes it makes. So give every loss
    that shares a recorded and checkpointed forward to :func:`gradbalance.backward` (regularizers as ``extra_loss``)
    instead of calling ``.backward()`` on it.

    The first time rows are collected through a module, one of them is compared with an ordinary backward pass.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with record(model):
    ...     output = model(torch.ones(3, 2))
    >>> output.grad_fn.name()
    'RecordedLinearBackward'
    >>> model(torch.ones(3, 2)).grad_fn.name()
    'MmBackward0'
    """
    recording = Recording(module)
    recording.install()
    try:
        yield
    finally:
        recording.remove()


@contextmanager
def resumed(recordings: Iterable[Recording]) -> Iterator[None]:
    """Record again during backward passes, for layers that gradient checkpointing recomputes."""
    with ExitStack() as stack:
        for recording in recordings:
            if not recording.installed:
                recording.install()
                stack.callback(recording.remove)
        yield


class RecordedLinear(torch.autograd.Function):
    """``nn.functional.linear`` whose backward can hand its weight gradient's two factors to a sink.

    Computes in the dtype that autocast would choose. Gradients come back in the dtype of their input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recording: Recording,
        name: str,
        layer: nn.Linear,
    ) -> Tensor:
        """The layer's output; autocast's dtype rules as for ``nn.functional.linear``."""
        ctx.recording, ctx.name_of_layer, ctx.layer, ctx.dtype = recording, name, layer, inputs.dtype
        inputs = as_autocast(inputs)
        # The weight is saved as it is, not its half-precision copy: nothing is held that was not there before.
        ctx.save_for_backward(inputs, weight)
        return nn.functional.linear(inputs, as_autocast(weight), None if bias is None else as_autocast(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """The input's gradient and, unless there is a sink to feed instead, weight's and bias's."""
        inputs, weight = ctx.saved_tensors
        recording: Recording = ctx.recording
        layer: nn.Linear = ctx.layer
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        with torch.autocast(inputs.device.type, enabled=False):
            if needs_input:
                grad_input = (cotangents @ weight.to(cotangents.dtype)).to(ctx.dtype)
            if recording.sink is not None:
                recording.sink(ctx.name_of_layer, layer, inputs, cotangents)
                return grad_input, None, None, None, None, None
            flat = cotangents.flatten(0, -2)
            if needs_weight:
                grad_weight = (flat.T @ inputs.flatten(0, -2)).to(weight.dtype)
            if needs_bias:
                grad_bias = flat.sum(0).to(layer.bias.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def as_autocast(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which an active autocast would run a linear layer; autocast leaves float64 alone."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor
