"""Runs of the trainer: what the gradient is made of, what is logged, saved and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import gradbalance as gb
from gradbalance_trl import BalancedGRPOConfig, BalancedGRPOTrainer
from gradbalance_trl.state import BalanceState
from tiny_grpo import prompts
from tiny_policy import tiny_policy

OFF_POLICY = {"num_iterations": 2, "max_steps": 4, "learning_rate": 3e-2}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---- exactness beyond the loss types -----------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_lagged_steps_with_the_coefficients_of_before(make_trainer, reference_trainer, lora: bool) -> None:
    trainer = make_trainer(reference_trainer, lora=lora, balance_refresh="lagged", **OFF_POLICY)
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert trainer.refreshed == [True, False, True, False]


@pytest.mark.parametrize("refresh", ["write", "lagged"])
def test_penalties_stay_outside_the_balancing(make_trainer, reference_trainer, refresh: str) -> None:
    options = {"entropy_coef": 0.02} if "entropy_coef" in GRPOConfig.__dataclass_fields__ else {}
    trainer = make_trainer(reference_trainer, lora=True, beta=0.2, balance_refresh=refresh, **options, **OFF_POLICY)
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert max(logged(trainer, "kl")) > 0


def test_dropout_is_the_same_for_every_reward(make_trainer, reference_trainer) -> None:
    trainer = make_trainer(reference_trainer, lora={"lora_dropout": 0.3})
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert trainer.balance_info.collector == "linear"


def test_checkpointing(make_trainer, reference_trainer) -> None:
    trainer = make_trainer(reference_trainer, lora={"lora_dropout": 0.3}, gradient_checkpointing=True)
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert trainer.balance_info.collector == "linear"


def test_half_precision_layers(make_trainer, reference_trainer) -> None:
    """bf16 autocast, TRL's default: equal to the rounding of bf16 (2^-8)."""
    trainer = make_trainer(reference_trainer, lora=True, bf16=True)
    trainer.train()
    assert max(trainer.errors) < 2e-2


@pytest.mark.parametrize("lora", [False, True])
def test_half_precision_weights(make_trainer, reference_trainer, lora: bool) -> None:
    """Log-probabilities may be bf16 too: the split is checked to their rounding."""
    trainer = make_trainer(reference_trainer, lora=lora, dtype=torch.bfloat16, max_steps=2, num_iterations=2)
    trainer.train()
    assert max(trainer.errors) < 5e-2


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"delta": 0.9},
        {"off_policy_mask_threshold": 1e-3},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"top_entropy_quantile": 0.5},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.slow
def test_losses_that_look_at_the_sign_of_an_advantage(make_trainer, reference_trainer, options) -> None:
    for policy in ({}, OFF_POLICY):
        trainer = make_trainer(reference_trainer, lora=True, **{**policy, **options})
        trainer.train()
        assert max(trainer.errors) < 1e-5


def test_a_loss_that_is_not_linear_even_on_policy(make_trainer, reference_trainer) -> None:
    """Ratios are cut at delta < 1 for one sign of the advantage only."""
    trainer = make_trainer(reference_trainer, delta=0.9)
    trainer.train()
    assert max(trainer.errors) < 1e-5


def test_off_policy_steps_leave_the_clip_range(make_trainer) -> None:
    """What makes the other off-policy tests hard."""
    trainer = make_trainer(**OFF_POLICY)
    trainer.train()
    assert max(logged(trainer, "clip_ratio/region_mean")) > 0.05


def test_a_balancer_without_memory(make_trainer, reference_trainer) -> None:
    trainer = make_trainer(
        reference_trainer, trainer_options={"balancer": gb.MGDA(), "twin": gb.MGDA()}, gradient_accumulation_steps=2
    )
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert all(trainer.refreshed)


class Overflow(TrainerCallback):
    """Raises the loss scale beyond float32 before step 2, and looks at what is there after it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.seen = trainer, []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= 2:
            self.trainer.accelerator.scaler.update(2.0 ** (126 if state.global_step == 2 else 10))
        self.before = (self.weights(), self.trainer._balance.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        after = (self.weights(), self.trainer._balance.state_dict())
        self.seen.append([bool(torch.equal(self.before[0], after[0])), self.before[1] == after[1]])

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.trainer.trained()])


@pytest.mark.parametrize(("refresh", "optimizer"), [("write", "adamw_torch"), ("lagged", "adamw_torch_fused")])
def test_scaled_losses_and_an_overflow_on_a_refresh(
    make_trainer, reference_trainer, reward_functions, refresh: str, optimizer: str
) -> None:
    def large(completions: list[str], **_: Any) -> list[float]:
        return [1e4 * len(set(text)) for text in completions]

    trainer = make_trainer(
        reference_trainer,
        rewards=[reward_functions["digits"], large],
        lora=True,
        beta=0.1,
        scale_rewards="none",
        balance_refresh=refresh,
        optim=optimizer,
        max_steps=4,
    )
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    overflow = Overflow(trainer)
    trainer.add_callback(overflow)
    trainer.train()
    assert max(trainer.errors[:2]) < 1e-5
    # Neither weights nor balancer move on the overflow, and the refresh is made up for on the next step.
    assert overflow.seen == [[False, False], [False, False], [True, True], [False, False]]
    assert len(logged(trainer, "balance/digits/grad_norm")) == 2
    assert logged(trainer, "balance/digits/coef")[2] == logged(trainer, "balance/digits/coef")[1]


# ---- costs -------------------------------------------------------------------------------------------------------


def test_all_rows_come_from_one_backward_pass(make_trainer) -> None:
    """With LoRA on-policy, also where transformers makes the embeddings require grad."""
    trainer = make_trainer(lora=True, balance_interval=1, max_steps=3)
    trainer.model.enable_input_require_grads()
    passes = [0]
    layer = trainer.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default")

    def count(gradient: torch.Tensor) -> None:
        passes[0] += 1

    def watch(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(count)

    layer.register_forward_hook(watch)
    trainer.train()
    assert trainer.balance_info.collector_reason.startswith("M = 1 ")
    # One for each of three steps, and one to check the first rows against.
    assert passes[0] == 3 + 1


def test_ordinary_steps_call_the_loss_once(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = GRPOTrainer.compute_loss
    monkeypatch.setattr(
        GRPOTrainer, "compute_loss", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )
    make_trainer(trainer_options={"balancer": gb.Mean()}, max_steps=2).train()
    assert len(calls) == 2


# ---- rewards -----------------------------------------------------------------------------------------------------


def test_weight_zero_is_logged_and_not_trained_on(make_trainer, reward_functions) -> None:
    with_it = make_trainer(reward_weights=[1.0, 0.0, 1.0])
    with_it.train()
    kept = [reward_functions["digits"], reward_functions["sometimes"]]
    without = make_trainer(rewards=kept)
    without.train()
    assert with_it.rewards.names == ("digits", "sometimes")
    assert len(logged(with_it, "rewards/letters/mean")) == 3
    assert not logged(with_it, "balance/letters/coef")
    for one, other in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_are_the_preference_of_the_default_balancer(make_trainer) -> None:
    trainer = make_trainer(reward_weights=[1.0, 3.0, 0.0], balance_interval=4, balance_ema_decay=0.5)
    assert repr(trainer.balancer) == repr(gb.MARBLE(interval=4, ema_decay=0.5, preference=[1.0, 3.0]))
    with pytest.raises(gb.InvalidArgumentError, match=r"MGDA\(preference="):
        make_trainer(reward_weights=[1.0, 3.0, 0.0], trainer_options={"balancer": gb.MGDA()})


def test_a_reward_that_says_nothing_stops_no_other(make_trainer, reference_trainer, reward_functions) -> None:
    def never(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    def constant(completions: list[str], **_: Any) -> list[float]:
        return [0.1] * len(completions)

    trainer = make_trainer(reference_trainer, rewards=[reward_functions["digits"], never, constant])
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert trainer.balance_info.inactive == ("never", "constant")
    assert trainer.balance_info.weights.tolist()[1:] == [0.0, 0.0]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_asynchronous_rewards(make_trainer, reference_trainer, reward_functions) -> None:
    async def slow(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text.split())) for text in completions]

    trainer = make_trainer(reference_trainer, rewards=[slow, reward_functions["digits"]])
    trainer.train()
    assert max(trainer.errors) < 1e-5


# ---- logs, checkpoints, model card -------------------------------------------------------------------------------


def test_metrics_of_trl_are_those_of_a_plain_run(make_trainer) -> None:
    """Calls of the loss for the rows leave no trace; the first step is the same, so its numbers must be."""
    options = {"max_steps": 1, "gradient_accumulation_steps": 2, "beta": 0.1, "lora": True}
    plain = make_trainer(GRPOTrainer, config=GRPOConfig, **options)
    plain.train()
    balanced = make_trainer(**options)
    balanced.train()
    first, second = plain.state.log_history[0], balanced.state.log_history[0]
    ours = {key for key in second if key.startswith("balance/")}
    assert set(second) - ours == set(first)
    assert ours == {f"balance/{name}/{kind}" for name in balanced.rewards.names for kind in ("coef", "grad_norm")} | {
        "balance/worst_cosine"
    }
    for key in ("kl", "entropy", "clip_ratio/region_mean", "reward", "rewards/digits/mean", "num_tokens"):
        assert second[key] == pytest.approx(first[key], abs=1e-6)
    assert not any(balanced._metrics["train"].values())


def test_clip_ratios_are_those_of_the_step(make_trainer) -> None:
    trainer = make_trainer(balance_interval=1, **OFF_POLICY)
    trainer.train()
    assert max(logged(trainer, "clip_ratio/region_mean")) > 0


def test_resuming_restores_the_coefficients(make_trainer, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "output_dir": str(tmp_path / "run")}
    whole = make_trainer(**options)
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["BalanceState"]
    for restore in (False, True):
        again = make_trainer(**options, restore_callback_states_from_checkpoint=restore)
        states = []

        class Watch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                states.append((state.global_step, BalanceState.found_in(state.stateful_callbacks)))  # noqa: B023

        again.add_callback(Watch)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert states[0] == (3, saved["attributes"]["saved"])
        for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert again._balance.state_dict() == whole._balance.state_dict()


def test_resuming_from_a_plain_run_is_told(make_trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "run")}
    make_trainer(GRPOTrainer, config=GRPOConfig, **{**options, "max_steps": 1}).train()
    trainer = make_trainer(**options, max_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert "holds no state of a balancer" in caplog.text


def test_model_card_names_the_method(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    for part in ("arXiv:2605.06507", "gradbalance", "MARBLE"):
        assert part in card
    assert "DeepSeekMath" not in card


def test_evaluation_is_that_of_trl(make_trainer) -> None:
    trainer = make_trainer(
        eval_strategy="steps", eval_steps=1, trainer_options={"eval_dataset": prompts().select([0, 1])}
    )
    trainer.args.num_generations_eval = 4
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 3
    assert not logged(trainer, "eval_balance/digits/coef")


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance_refresh": "late"}, "'write' or 'lagged'"),
        ({"balance_interval": 0}, "`balance_interval`"),
        ({"balance_ema_decay": 1.0}, "`balance_ema_decay`"),
        ({"reward_weights": [1.0, -1.0, 1.0]}, "negate it"),
    ],
)
def test_options_out_of_range(make_trainer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gb.InvalidArgumentError, match=message):
        make_trainer(**options)


def test_the_config_of_trl_is_not_enough(make_trainer) -> None:
    with pytest.raises(gb.InvalidArgumentError, match="BalancedGRPOConfig"):
        make_trainer(config=GRPOConfig)


def test_reentrant_checkpointing_is_refused_where_rows_are_needed(make_trainer) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(gb.InvalidArgumentError, match="use_reentrant=False"):
        make_trainer(**options)
    make_trainer(**options, trainer_options={"balancer": gb.Fixed([1, 1, 1])})


def test_a_loss_that_cannot_be_split_is_refused(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    original = GRPOTrainer._compute_loss

    def squared(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return original(self, model, inputs) * (1 + inputs["advantages"].abs().mean())

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", squared)
    with pytest.raises(gb.CollectorError, match="not a sum over samples of terms proportional to their advantage"):
        make_trainer().train()


def test_rewards_of_the_wrong_length_are_named(make_trainer) -> None:
    """E4: one number per completion."""

    def short(completions: list[str], **_: Any) -> list[float]:
        return [1.0, 2.0]

    with pytest.raises((ValueError, RuntimeError)):
        make_trainer(rewards=[short]).train()


def test_defaults(tokenizer, reward_functions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A config is made if none is given, and a single reward is plain GRPO up to the scale of its advantages."""
    monkeypatch.chdir(tmp_path)
    # TRL's default is bf16, which transformers refuses without a GPU unless asked for by use_cpu.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = BalancedGRPOTrainer(
        tiny_policy(len(tokenizer)), reward_functions["digits"], train_dataset=prompts(), processing_class=tokenizer
    )
    assert isinstance(trainer.args, BalancedGRPOConfig)
    assert trainer.args.output_dir.endswith("BalancedGRPO")
    assert isinstance(trainer.balancer, gb.MARBLE)
