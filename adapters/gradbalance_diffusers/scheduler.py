"""DPM-Solver++ 2M on the noise levels of a pipeline's own flow-matching Euler scheduler."""

from __future__ import annotations

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, StateError


def check_flow_scheduler(scheduler: object) -> None:
    """Raise unless ``scheduler`` is a deterministic flow-matching Euler scheduler with a fixed shift.

    Raises:
        InvalidArgumentError: Another class, or an option that this adapter does not support.
    """
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise InvalidArgumentError(
            "`pipeline.scheduler` must be a FlowMatchEulerDiscreteScheduler, whose noise levels are used for sampling "
            f"and for training. Found {type(scheduler).__name__}. Load the model's own scheduler."
        )
    for option in ("use_dynamic_shifting", "stochastic_sampling", "invert_sigmas"):
        if scheduler.config.get(option):
            raise InvalidArgumentError(f"`pipeline.scheduler` must have {option}=False. Found True. Set it to False.")


def noise_levels(scheduler: FlowMatchEulerDiscreteScheduler, steps: int) -> Tensor:
    """Noise levels of ``steps`` sampling steps: one grid for sampling and for training.

    Args:
        scheduler: Flow-matching Euler scheduler; it is not changed.
        steps: Number of network evaluations, at least 1.

    Returns:
        ``[steps + 1]`` float32 on the CPU, strictly decreasing, the last one 0.

    Raises:
        InvalidArgumentError: ``steps`` < 1, or levels that are not finite and strictly decreasing.

    >>> from diffusers import FlowMatchEulerDiscreteScheduler
    >>> noise_levels(FlowMatchEulerDiscreteScheduler(shift=3.0), 3)
    tensor([1.0000, 0.7511, 0.0089, 0.0000])
    """
    check_flow_scheduler(scheduler)
    if steps < 1:
        raise InvalidArgumentError(f"`steps` must be at least 1. Found {steps}.")
    copy = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    copy.set_timesteps(steps, device="cpu")
    sigmas = copy.sigmas
    if not bool(torch.isfinite(sigmas).all()) or not bool((sigmas.diff() < 0).all()):
        # A repeated time step makes diffusers look up the wrong index and run past the end of its grid.
        raise InvalidArgumentError(
            f"The {steps} noise levels of the scheduler must be finite and strictly decreasing. Found "
            f"{[round(s, 6) for s in sigmas.tolist()]}. Use fewer steps, or another shift."
        )
    return sigmas


class FlowDPMSolverMultistepScheduler(DPMSolverMultistepScheduler):
    r"""DPM-Solver++ 2M in data prediction, on the sigmas and float time steps of a flow-matching Euler scheduler.

    With :math:`a = 1 - \sigma`, :math:`\lambda = \log(a/\sigma)`, the estimate :math:`D_0 = x - \sigma v`, the step
    :math:`h = \lambda_t - \lambda_s` and :math:`D_1 = (D_0 - D_0^{prev})\, h / h^{prev}`:

    .. math:: x_t = \frac{\sigma_t}{\sigma_s} x_s - a_t (e^{-h} - 1) \left(D_0 + \tfrac12 D_1\right)

    The first and the last step are of first order (:math:`D_1 = 0`), as in DiffusionNFT. diffusers' own
    ``use_flow_sigmas`` has another grid (its last noise level is 0.25 instead of 0.009 with 10 steps and shift 3) and
    integer time steps; here the network sees the same (noise level, time) pairs in sampling and in training.

    Build it with :meth:`from_euler`. Source: Lu et al., DPM-Solver++ (arXiv 2211.01095), algorithm 2.
    """

    _euler: FlowMatchEulerDiscreteScheduler | None = None

    @classmethod
    def from_euler(cls, euler: FlowMatchEulerDiscreteScheduler) -> FlowDPMSolverMultistepScheduler:
        """A solver on the grid of ``euler``, of which it keeps a copy.

        Raises:
            InvalidArgumentError: ``euler`` is not a flow-matching Euler scheduler with a fixed shift.
        """
        check_flow_scheduler(euler)
        scheduler = cls(
            num_train_timesteps=euler.config.num_train_timesteps,
            algorithm_type="dpmsolver++",
            solver_order=2,
            solver_type="midpoint",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=euler.config.shift,
            final_sigmas_type="zero",
        )
        scheduler._euler = FlowMatchEulerDiscreteScheduler.from_config(euler.config)
        return scheduler

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Take the grid of ``num_inference_steps`` steps; called by the pipeline."""
        if self._euler is None:
            raise StateError(
                "A FlowDPMSolverMultistepScheduler has no grid of its own. Build it with "
                "FlowDPMSolverMultistepScheduler.from_euler(pipeline.scheduler)."
            )
        self.sigmas = noise_levels(self._euler, num_inference_steps)
        self.timesteps = (self.sigmas[:-1] * self.config.num_train_timesteps).to(device)
        self.num_inference_steps = num_inference_steps
        # The solver's history must not reach from one batch of images into the next.
        self.model_outputs = [None] * self.config.solver_order
        self.lower_order_nums = 0
        self._step_index = self._begin_index = None
