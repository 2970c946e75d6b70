"""The example with coefficients from the first micro-batch of a refresh, as published, in place of its whole batch.

``python -m benchmarks.evidence.first_batch`` takes the options of ``examples/sd35_marble.py``.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import gradbalance as gb
from benchmarks.evidence.probe import FIRST
from benchmarks.evidence.training import EXAMPLE
from gradbalance_diffusers import trainer
from gradbalance_diffusers.stages import Stage
from gradbalance_diffusers.update import EpochData, PolicyUpdate, StepResult


class AskedElsewhere:
    """A MARBLE balancer that is shown a Gramian by someone else, and gives its weights to whole steps.

    >>> balancer = AskedElsewhere(gb.MARBLE(interval=2))
    >>> balancer.show(torch.diag(torch.tensor([1.0, 9.0])))
    >>> balancer.needs_rows, balancer.weights
    (False, tensor([1.0000, 0.3333], dtype=torch.float64))
    """

    needs_rows = False

    def __init__(self, balancer: gb.MARBLE) -> None:
        self.balancer = balancer
        self._fresh: Tensor | None = None

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Never asked: rows are not needed."""
        raise NotImplementedError

    def show(self, gram: Tensor) -> None:
        """Refresh from this Gramian."""
        self._fresh = self.balancer(gram)

    @property
    def weights(self) -> Tensor:
        """Of the solve on the step of a refresh, smoothed after it."""
        return self.balancer.weights if self._fresh is None else self._fresh

    @property
    def coefficients(self) -> Tensor | None:
        """Those behind the weights."""
        return self.balancer.coefficients

    def step(self) -> None:
        """One optimizer step has been made."""
        self._fresh = None
        self.balancer.step()

    def state_dict(self) -> dict[str, Any]:
        """That of the balancer; between steps there is nothing else."""
        return self.balancer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.balancer.load_state_dict(dict(state))


class FirstBatchUpdate(PolicyUpdate):
    """Solves on the first micro-batch of a refresh step, and uses the answer on the whole step."""

    def enter_stage(self, stage: Stage) -> None:
        """Put :class:`AskedElsewhere` around the stage's balancer."""
        super().enter_stage(stage)
        self.asked = AskedElsewhere(self.optimizer.balancer)
        self.optimizer = gb.BalancedOptimizer(self.inner_optimizer, self.asked)
        self.probe = gb.BalancedOptimizer(
            torch.optim.SGD(self.policy.parameters.values(), lr=0.0), self._show, module=self.policy.transformer
        )

    def _show(self, gram: Tensor) -> Tensor:
        self.asked.show(gram)
        return torch.zeros(len(gram), dtype=gram.dtype)

    def step(self, data: EpochData, samples: Tensor) -> StepResult:
        """Look at the first micro-batch where a refresh is due, then take the step."""
        if self.asked.balancer.needs_rows:
            whole, self.optimizer = self.optimizer, self.probe
            self._backward(data, samples[: max(1, round(FIRST * len(samples)))])
            self.probe.balance()
            self.probe.zero_grad()
            self.optimizer = whole
        return super().step(data, samples)


def main() -> None:
    """Run the example with the other update; everything else is its own."""
    trainer.PolicyUpdate = FirstBatchUpdate
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
