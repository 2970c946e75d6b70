"""A moving average of the trained weights, for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradbalance.errors import InvalidArgumentError, StateError


class WeightEMA:
    r"""Exponential moving average of parameters, in their own dtype and on their own device.

    After update number k (counted from 1),

    .. math:: m \leftarrow d_k m + (1 - d_k) p, \qquad d_k = \min\left(\frac{1 + k}{10 + k}, \text{decay}\right)

    with ``warmup``, else :math:`d_k` = ``decay``. The configured decay itself never changes. The average starts at the
    parameters.

    Args:
        parameters: Parameters by name; the objects are kept, and read at every update.
        decay: In [0, 1).
        warmup: Follow faster at the beginning.

    Raises:
        InvalidArgumentError: ``decay`` out of range, or no parameters.

    >>> p = nn.Parameter(torch.zeros(1))
    >>> ema = WeightEMA({"p": p}, decay=0.5, warmup=False)
    >>> p.data.fill_(1.0); ema.update()
    tensor([1.])
    >>> with ema.applied():
    ...     p.item()
    0.5
    >>> p.item()
    1.0
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float = 0.9, warmup: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise InvalidArgumentError(f"`decay` must be in [0, 1). Found {decay}.")
        if not parameters:
            raise InvalidArgumentError("`parameters` must not be empty. Found none.")
        self._parameters = dict(parameters)
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._applied = False

    def decay_at(self, update: int) -> float:
        """The decay of update number ``update``, counted from 1."""
        return min((1 + update) / (10 + update), self.decay) if self.warmup else self.decay

    @torch.no_grad()
    def update(self) -> None:
        """Take the present parameters into the average.

        Raises:
            StateError: Inside :meth:`applied`, where the parameters are the average itself.
        """
        if self._applied:
            raise StateError("update() must be called outside `with ema.applied()`. Leave the block first.")
        self.updates += 1
        weight = 1.0 - self.decay_at(self.updates)
        for name, parameter in self._parameters.items():
            self._average[name].lerp_(parameter, weight)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the parameters hold the average; afterwards their own values again, bit for bit.

        Raises:
            StateError: If entered twice.
        """
        if self._applied:
            raise StateError("`with ema.applied()` must not be nested. The average is in place already.")
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._applied = True
        try:
            self._write(self._average)
            yield
        finally:
            self._write(own)
            self._applied = False

    def state_dict(self) -> dict[str, Any]:
        """``{"updates": int, "average": {name: tensor}}``; the tensors are copies."""
        return {"updates": self.updates, "average": {name: t.clone() for name, t in self._average.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            InvalidArgumentError: Names or shapes are not those of the parameters; nothing is changed then.
        """
        average: Mapping[str, Tensor] = state["average"]
        if set(average) != set(self._average):
            differing = sorted(set(average) ^ set(self._average))
            raise InvalidArgumentError(
                f"`state` must hold the averages of the same parameters. Differing: {differing}."
            )
        for name, tensor in average.items():
            if tensor.shape != self._average[name].shape:
                raise InvalidArgumentError(
                    f"`state` holds {name!r} with shape {tuple(tensor.shape)}; the parameter has "
                    f"{tuple(self._average[name].shape)}."
                )
        for name, tensor in average.items():
            self._average[name].copy_(tensor)
        self.updates = int(state["updates"])

    @torch.no_grad()
    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
