"""Optimizer steps in low precision, with NaN, and with priorities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradbalance as gb
from gradbalance_diffusers.balance import make_balancer
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.embeddings import PromptEncoder
from gradbalance_diffusers.rewards import RewardSet, make_reward
from gradbalance_diffusers.trainer import NFTTrainer
from small_run import Interrupting, Make, first_gradient, outcome, rows

FP16 = "run.mixed_precision=fp16"
ONE = ("run.epochs=1", "evaluation.every=100")


def weights(trainer: NFTTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters.values()])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("method", ["marble", "mean"])
def test_low_precision_gives_nearly_the_gradient_of_float32(make: Make, precision: str, method: str) -> None:
    options = [f"balance.method={method}", "loss.kl_weight=0.01", "optimizer.max_grad_norm=null"]
    exact = first_gradient(make("exact", *options))
    rough = first_gradient(make("rough", *options, f"run.mixed_precision={precision}"))
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.99
    assert float(rough.norm() / exact.norm()) == pytest.approx(1, abs=0.05), "the loss scale is taken out again"
    assert not torch.equal(exact, rough)


@pytest.mark.parametrize(
    "options",
    [("model.dtype=bfloat16", "run.mixed_precision=bf16"), ("model.dtype=float16", FP16), ("model.dtype=bfloat16",)],
)
def test_half_precision_bases_train(make: Make, options: tuple[str, ...]) -> None:
    trainer = make("run", *options, *ONE, "loss.kl_weight=0.01")
    before = weights(trainer)
    trainer.fit()
    assert trainer.policy.dtype in (torch.bfloat16, torch.float16)
    assert weights(trainer).dtype == torch.float32
    assert not torch.equal(weights(trainer), before)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_equal_weights_give_equal_predictions_whatever_the_role(load_policy: Any, precision: str) -> None:
    """Training starts with v = v_old to the bit: the first ratio, KL and loss depend on it."""
    policy = load_policy(mixed_precision=precision, gradient_checkpointing=True)
    for parameter in policy.parameters.values():
        parameter.data.normal_(std=0.1)
    policy.synchronize_old()
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([0.4, 1.0]), PromptEncoder(policy).encode(["a", "b"])
    with torch.no_grad(), policy.role("old"):
        old = policy.velocity(*inputs)
    trained = policy.velocity(*inputs)
    assert trained.requires_grad
    assert torch.equal(trained, old)


def test_fp16_run_is_interrupted_and_continues_bit_for_bit(make: Make) -> None:
    whole = make("whole", FP16)
    whole.fit()
    broken = make("broken", FP16, rewards=Interrupting(whole.config, 9))
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    resumed = make("broken", FP16, resume=True)
    resumed.resume()
    resumed.fit()
    assert outcome(resumed) == outcome(whole)
    log = rows(whole, "train")
    assert log[-1]["loss_scale"] == 2.0 ** (16 - sum(row["overflows"] for row in log))


def test_loss_scale_is_part_of_a_checkpoint(make: Make) -> None:
    trainer = make("run", FP16, *ONE, "run.checkpoint_every=1")
    trainer.update.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    trainer.update.enter_stage(trainer.stage)
    trainer.fit()
    resumed = make("run", FP16, *ONE, resume=True)
    resumed.resume()
    assert resumed.update.scaler.get_scale() == 128.0


@pytest.mark.parametrize("method", ["marble", "mean"])
def test_overflow_repeats_the_step_with_a_lower_scale(make: Make, method: str) -> None:
    trainer = make("run", FP16, *ONE, f"balance.method={method}")
    before = weights(trainer)
    trainer.update.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    trainer.update.enter_stage(trainer.stage)
    trainer.train_epoch(0)
    (row,) = rows(trainer, "train")
    assert row["overflows"] > 0
    assert row["loss_scale"] == 2.0 ** (30 - row["overflows"])
    assert math.isfinite(row["grad_norm"])
    assert not torch.equal(weights(trainer), before)
    assert (trainer.update.ema.updates, trainer.update.scheduler.last_epoch) == (1, 1), "repeats do not count"


def spoil(trainer: NFTTrainer, times: int) -> list[None]:
    """The first ``times`` predictions of the trained policy are NaN; returns the list of its calls."""
    velocity, calls = trainer.policy.velocity, []

    def broken(*args: Any) -> Tensor:
        prediction = velocity(*args)
        if trainer.policy.active_role == "default":
            calls.append(None)
            if len(calls) <= times:
                return prediction * math.nan
        return prediction

    trainer.policy.velocity = broken
    return calls


def test_nan_in_the_network_ends_an_fp16_run_at_once(make: Make) -> None:
    trainer = make("run", FP16, *ONE)
    calls = spoil(trainer, times=10**6)
    with pytest.raises(gb.NonFiniteError, match=r"fp16.*loss is nan.*bf16"):
        trainer.train_epoch(0)
    assert len(calls) == 2, "no repeat: one call per noise level"


def test_a_loss_scale_that_keeps_falling_ends_the_run(make: Make) -> None:
    trainer = make("run", FP16, *ONE, "balance.method=weighted-sum")
    trainer.update.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    trainer.update.enter_stage(trainer.stage)
    with pytest.raises(gb.NonFiniteError, match=r"loss scale fell to 0\.5"):
        trainer.train_epoch(0)


def test_nan_raises_by_default_and_is_skipped_on_request(make: Make) -> None:
    trainer = make("raise", *ONE)
    spoil(trainer, times=1)
    with pytest.raises(gb.NonFiniteError):
        trainer.train_epoch(0)

    trainer = make("skip", "run.epochs=2", "evaluation.every=100", "optimizer.on_nonfinite=skip")
    before = weights(trainer)
    spoil(trainer, times=1)
    trainer.train_epoch(0)
    assert torch.equal(weights(trainer), before)
    assert trainer.update.ema.updates == 0
    trainer.train_epoch(1)
    assert not torch.equal(weights(trainer), before)
    skipped, good = rows(trainer, "train")
    assert {"saturation", "contrast", "background"} <= set(skipped["skipped"])
    assert skipped["grad_norm"] is None
    assert good["skipped"] == []
    assert skipped["lr"] == good["lr"], "a step that was not made does not move the schedule"


class Constant:
    """The same score for every picture."""

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Any) -> list[float]:
        return [0.5] * len(images)


@pytest.mark.parametrize("method", ["marble", "mgda", "mean"])
@pytest.mark.parametrize("center", ["true", "false"])
def test_a_reward_without_spread_takes_no_part(make: Make, method: str, center: str) -> None:
    options = [f"balance.method={method}", f"loss.center={center}", *ONE, "loss.kl_weight=0.01"]
    scored = make("all", *options)
    names = scored.rewards.names
    dead = RewardSet({name: Constant() if name == "contrast" else make_reward(name) for name in names})
    trainer = make("dead", *options, rewards=dead)
    trainer.train_epoch(0)
    (row,) = rows(trainer, "train")
    assert row["inactive"] == ["contrast"]
    assert row["norms"]["contrast"] == 0
    assert row["degenerate_groups"]["contrast"] == 3
    if method != "mean":
        assert row["weights"]["contrast"] == 0
    assert min(row["norms"][name] for name in names if name != "contrast") > 0


def test_without_any_spread_only_the_penalty_trains(make: Make) -> None:
    trainer = make(
        "run",
        "balance.method=marble",
        "loss.center=false",
        "loss.kl_weight=0.01",
        "run.epochs=2",
        rewards=RewardSet({name: Constant() for name in ("saturation", "contrast", "background")}),
    )
    trainer.train_epoch(0)
    trainer.train_epoch(1)
    first, second = rows(trainer, "train")
    assert first["inactive"] == ["saturation", "contrast", "background"]
    assert first["weights"] == dict.fromkeys(first["weights"], 0.0)
    assert first["grad_norm"] == second["grad_norm"] == 0.0
    assert second["refreshed"], "a refresh without any signal stays due"


def test_preference_sets_relative_gains(make: Make) -> None:
    trainer = make("run", "balance.preference={contrast: 1.2}", *ONE)
    trainer.train_epoch(0)
    (row,) = rows(trainer, "train")
    gains, coefficients = row["cosines"], row["coefficients"]
    assert min(coefficients["contrast"], coefficients["background"]) > 0.1
    assert gains["contrast"] == pytest.approx(1.2 * gains["background"], rel=1e-3)
    assert gains["saturation"] >= gains["background"], "whoever has no weight gains no less"


def test_preference_goes_by_name_in_every_stage() -> None:
    config = load_config("tiny", ["balance.preference={ocr: 2}"]).balance
    for method in ("marble", "mgda"):
        assert make_balancer(config, method, ["geneval", "ocr"]).preference == (1.0, 2.0)
        assert make_balancer(config, method, ["saturation"]).preference == (1.0,)
    assert make_balancer(load_config("tiny").balance, "marble", ["ocr"]).preference is None
