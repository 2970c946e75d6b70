from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers.scheduler import FlowDPMSolverMultistepScheduler, noise_levels


def field(x: Tensor, sigma: float) -> Tensor:
    """A smooth stand-in for the network."""
    return torch.tanh(x) * (1.3 - sigma) - 0.4 * x + math.sin(5 * sigma)


def literal_dpm_solver(x: Tensor, sigmas: list[float]) -> Tensor:
    """DPM-Solver++ 2M written out step by step in float64; first and last step of first order."""
    previous, previous_lambda = None, None
    for i in range(len(sigmas) - 1):
        s, t = sigmas[i], sigmas[i + 1]
        clean = x - s * field(x, s)
        log_snr = math.log((1 - s) / s) if s < 1 else -math.inf
        if i == 0 or i == len(sigmas) - 2:
            noise = (x - (1 - s) * clean) / s
            x = (1 - t) * clean + t * noise
        else:
            h = math.log((1 - t) / t) - log_snr
            h_before = log_snr - previous_lambda
            slope = (clean - previous) * (h / h_before)
            x = (t / s) * x - (1 - t) * (math.exp(-h) - 1) * (clean + 0.5 * slope)
        previous, previous_lambda = clean, log_snr
    return x


def run(scheduler: FlowDPMSolverMultistepScheduler, x: Tensor, steps: int) -> Tensor:
    scheduler.set_timesteps(steps)
    for time in scheduler.timesteps:
        x = scheduler.step(field(x, float(time) / 1000), time, x, return_dict=False)[0]
    return x


@pytest.fixture
def euler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 25])
def test_steps_follow_the_formulas(euler: FlowMatchEulerDiscreteScheduler, steps: int) -> None:
    scheduler = FlowDPMSolverMultistepScheduler.from_euler(euler)
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(steps))
    expected = literal_dpm_solver(x.double(), scheduler_sigmas(euler, steps))
    found = run(scheduler, x, steps)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=1e-6)


def scheduler_sigmas(euler: FlowMatchEulerDiscreteScheduler, steps: int) -> list[float]:
    euler.set_timesteps(steps)
    return euler.sigmas.double().tolist()


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 25, 40])
def test_grid_is_that_of_the_euler_scheduler(euler: FlowMatchEulerDiscreteScheduler, steps: int) -> None:
    scheduler = FlowDPMSolverMultistepScheduler.from_euler(euler)
    scheduler.set_timesteps(steps)
    euler.set_timesteps(steps)
    assert torch.equal(scheduler.sigmas, euler.sigmas)
    assert torch.equal(scheduler.timesteps, euler.timesteps)
    assert scheduler.timesteps.dtype == torch.float32
    assert torch.equal(noise_levels(euler, steps), euler.sigmas)


def test_known_levels(euler: FlowMatchEulerDiscreteScheduler) -> None:
    levels = noise_levels(euler, 10)
    expected = [1.0, 0.9601, 0.9133, 0.2780, 0.0089, 0.0]
    assert levels[[0, 1, 2, -3, -2, -1]].tolist() == pytest.approx(expected, abs=1e-4)


def test_second_run_does_not_remember_the_first(euler: FlowMatchEulerDiscreteScheduler) -> None:
    scheduler = FlowDPMSolverMultistepScheduler.from_euler(euler)
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    first = run(scheduler, x, 6)
    run(scheduler, 5 * x, 4)
    assert torch.equal(run(scheduler, x, 6), first)


def test_the_euler_scheduler_is_left_alone(euler: FlowMatchEulerDiscreteScheduler) -> None:
    euler.set_timesteps(7)
    before = euler.sigmas.clone()
    FlowDPMSolverMultistepScheduler.from_euler(euler).set_timesteps(4)
    noise_levels(euler, 5)
    assert torch.equal(euler.sigmas, before)


def test_needs_an_euler_scheduler() -> None:
    with pytest.raises(StateError, match="from_euler"):
        FlowDPMSolverMultistepScheduler().set_timesteps(5)
    with pytest.raises(InvalidArgumentError, match="DDIMScheduler"):
        FlowDPMSolverMultistepScheduler.from_euler(DDIMScheduler())


@pytest.mark.parametrize("option", ["use_dynamic_shifting", "stochastic_sampling", "invert_sigmas"])
def test_unsupported_options_are_refused(option: str) -> None:
    with pytest.raises(InvalidArgumentError, match=option):
        FlowDPMSolverMultistepScheduler.from_euler(FlowMatchEulerDiscreteScheduler(**{option: True}))


def test_repeated_levels_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="strictly decreasing"):
        noise_levels(FlowMatchEulerDiscreteScheduler(num_train_timesteps=1), 3)


def test_no_steps(euler: FlowMatchEulerDiscreteScheduler) -> None:
    with pytest.raises(InvalidArgumentError, match="steps"):
        noise_levels(euler, 0)
