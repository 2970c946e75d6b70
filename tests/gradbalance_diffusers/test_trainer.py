"""The training loop on a very small random SD3: every method runs, and an interrupted run continues bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gradbalance as gb
from gradbalance_diffusers.assembly import evaluation_prompts, load_policy, load_rewards, training_prompts
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.rewards import RewardSet
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.summarize import before_after, summary_table
from gradbalance_diffusers.trainer import NFTTrainer
from small_run import Interrupting, Make, first_gradient, outcome, rows


@pytest.mark.parametrize("calls", [1, 4, 6, 9])
def test_interrupted_run_continues_bit_for_bit(make: Make, calls: int) -> None:
    whole = make("whole")
    whole.fit()
    broken = make("broken", rewards=Interrupting(whole.config, calls))
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    resumed = make("broken", resume=True)
    resumed.resume()
    resumed.fit()
    assert outcome(resumed) == outcome(whole)
    assert len(rows(whole, "train")) == 4


def test_conflicts_are_measured_across_interruptions(make: Make) -> None:
    """From the rows of independent refreshes, without a pass more; the policy that results is the same."""
    options = ("balance.interval=1", "run.epochs=5", "run.checkpoint_every=1", "evaluation.every=100")
    whole = make("whole", *options, "balance.measure_conflicts=true")
    whole.fit()
    broken = make("broken", *options, "balance.measure_conflicts=true", rewards=Interrupting(whole.config, 5))
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    resumed = make("broken", *options, "balance.measure_conflicts=true", resume=True)
    resumed.resume()
    assert resumed.update.meter is not None
    assert 2 <= resumed.update.meter.batches < 5
    resumed.fit()
    assert outcome(resumed) == outcome(whole)
    found = [row["expected"] for row in rows(whole, "train")]
    assert found[0] is None
    assert [row["batches"] for row in found[1:]] == [2, 3, 4, 5]
    assert len(found[-1]["pairs"]) == 3
    assert {pair["verdict"] for pair in found[-1]["pairs"]} <= {"conflict", "aligned", "not yet known"}
    plain = make("plain", *options)
    plain.fit()
    assert all(torch.equal(p, whole.policy.parameters[name]) for name, p in plain.policy.parameters.items())


def test_resuming_with_another_configuration_is_refused(make: Make) -> None:
    make("run").fit()
    other = make("run", "loss.guidance_beta=0.5", resume=True)
    with pytest.raises(gb.StateError, match="guidance_beta"):
        other.resume()


@pytest.mark.parametrize("method", ["marble", "mgda", "nash", "mean", "weighted-sum"])
def test_every_method_moves_the_policy(make: Make, method: str) -> None:
    trainer = make("run", f"balance.method={method}", "run.epochs=2", "evaluation.every=100")
    before = {name: p.detach().clone() for name, p in trainer.policy.parameters.items()}
    trainer.fit()
    moved = [name for name, p in trainer.policy.parameters.items() if not torch.equal(p, before[name])]
    assert moved
    names = {"sum"} if method == "weighted-sum" else {"saturation", "contrast", "background"}
    for row in rows(trainer, "train"):
        assert set(row["weights"]) == names
        assert set(row["rewards"]) == {"saturation", "contrast", "background"}


def test_marble_refreshes_on_schedule_and_uses_the_linear_collector(make: Make) -> None:
    trainer = make("run", "evaluation.every=100")
    trainer.fit()
    log = rows(trainer, "train")
    assert [row["refreshed"] for row in log] == [True, False, True, False]
    assert {row["collector"] for row in log} == {"linear", None}
    worst = [min(row["cosines"].values()) for row in log if row["refreshed"]]
    assert min(worst) > 0, "the min-norm direction opposes no reward of its own batch"


def test_stages_change_rewards_prompts_and_method(make: Make) -> None:
    stages = (
        "stages=[{name: first, epochs: 1, rewards: [contrast], mix: {ocr: 1}}, {name: second, epochs: 1, method: mean}]"
    )
    trainer = make("run", stages, "run.epochs=2", "evaluation.every=100")
    trainer.fit()
    first, second = rows(trainer, "train")
    assert (first["stage"], set(first["weights"])) == ("first", {"contrast"})
    assert second["weights"] == dict.fromkeys(["saturation", "contrast", "background"], 1 / 3)


def test_interrupted_between_stages_continues_bit_for_bit(make: Make) -> None:
    stages = "stages=[{name: one, epochs: 2, rewards: [contrast]}, {name: all, epochs: 2}]"
    whole = make("whole", stages)
    whole.fit()
    broken = make("broken", stages, rewards=Interrupting(whole.config, 7))
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    resumed = make("broken", stages, resume=True)
    resumed.resume()
    resumed.fit()
    assert outcome(resumed) == outcome(whole)


@pytest.mark.parametrize(
    ("method", "center", "tolerance"),
    [
        ("mean", "true", 1e-5),
        ("mean", "false", 1e-5),
        ("marble", "true", 1e-5),
        # Uncentered rows share the pull to the old policy and are almost parallel: the solve amplifies their rounding.
        ("marble", "false", 1e-3),
    ],
)
def test_micro_batches_give_the_gradient_of_the_whole(make: Make, method: str, center: str, tolerance: float) -> None:
    options = [f"loss.center={center}", f"balance.method={method}", "loss.kl_weight=0.01"]
    options += ["optimizer.max_grad_norm=null"]
    whole = first_gradient(make("whole", *options))
    parts = first_gradient(make("parts", *options, "optimizer.micro_batch_size=5"))
    assert torch.linalg.vector_norm(whole - parts) <= tolerance * torch.linalg.vector_norm(whole)


def test_gradient_checkpointing_changes_nothing(make: Make) -> None:
    plain = first_gradient(make("plain", "optimizer.max_grad_norm=null"))
    recomputed = first_gradient(make("again", "optimizer.max_grad_norm=null", "model.gradient_checkpointing=true"))
    assert torch.linalg.vector_norm(plain - recomputed) <= 1e-5 * torch.linalg.vector_norm(plain)


def test_linear_and_passes_collectors_agree(make: Make) -> None:
    options = ["optimizer.max_grad_norm=null", "loss.kl_weight=0.01"]
    linear = first_gradient(make("linear", *options, "balance.collector=linear"))
    passes = first_gradient(make("passes", *options, "balance.collector=passes"))
    assert torch.linalg.vector_norm(linear - passes) <= 1e-5 * torch.linalg.vector_norm(passes)


@pytest.mark.parametrize("where", ["offload", "drop"])
def test_the_place_of_the_text_encoders_changes_nothing(make: Make, where: str) -> None:
    stages = "stages=[{name: one, epochs: 1, mix: {ocr: 1}}, {name: all, epochs: 3}]"
    kept = make("kept", stages)
    kept.fit()
    other = make("other", stages, f"model.text_encoders={where}", "model.cached_prompts=2")
    other.fit()
    assert outcome(other) == outcome(kept)
    assert (other.policy.pipeline.text_encoder is None) == (where == "drop")


def test_guidance_while_training_warns(make: Make) -> None:
    with pytest.warns(RuntimeWarning, match="without guidance"):
        trainer = make("run", "sampling.guidance_scale=2", "model.text_encoders=drop", "run.epochs=1")
    trainer.fit()


def test_several_steps_per_epoch_use_every_group_once(make: Make) -> None:
    trainer = make("run", "optimizer.steps_per_epoch=3", "run.epochs=1", "evaluation.every=100")
    trainer.fit()
    assert [row["step"] for row in rows(trainer, "train")] == [1, 2, 3]


def test_old_policy_follows_by_its_schedule(make: Make) -> None:
    trainer = make("run", "old_policy.decay=0.25", "evaluation.every=100")
    old = {name: p.detach().clone() for name, p in trainer.policy.old_parameters.items()}
    trainer.train_epoch(0)
    for name, before in old.items():
        expected = 0.25 * before + 0.75 * trainer.policy.parameters[name].detach()
        torch.testing.assert_close(trainer.policy.old_parameters[name], expected)


def test_a_failing_reward_stops_the_run_with_its_name(make: Make) -> None:
    def broken(images: Any, prompts: Any, **metadata: Any) -> list[float]:
        raise ValueError("no scorer here")

    trainer = make("run", rewards=RewardSet({"saturation": broken, "contrast": broken, "background": broken}))
    with pytest.raises(gb.GradBalanceError, match=r"saturation.*no scorer here"):
        trainer.fit()


def test_finished_runs_are_summarized(make: Make) -> None:
    trainer = make("run", "evaluation.saved_images=2")
    trainer.fit()
    header, _, untrained, line = summary_table([trainer.folder.path]).splitlines()
    assert header == "| run | saturation | contrast | background |"
    change = rows(trainer, "eval")[-1]["change"]["contrast"]
    assert f"{change['mean']:+.3f} ± {change['se']:.3f}" in line
    assert f"{rows(trainer, 'eval')[0]['rewards']['contrast']['mean']:.3f}" in untrained
    assert before_after(trainer.folder.path, sources=("ocr",), count=2).width > 2 * 128


def test_the_sd35_recipe_trains_a_small_pipeline_of_that_architecture(t5_pipeline_path: Path, tmp_path: Path) -> None:
    """bf16 base and autocast, T5, gradient checkpointing, DPM++ 2M on the grid, KL, uncentered: as published."""
    for name, text in {"general": "a cat\na dog\n", "ocr": 'a sign that says "OK"\n'}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    files = {name: str(tmp_path / f"{name}.txt") for name in ("general", "ocr")}
    overrides = [
        f"model.path={t5_pipeline_path}",
        *["model.device=cpu", "model.height=16", "model.width=16", "model.lora_rank=4", "model.max_sequence_length=5"],
        *[
            "sampling.steps=3",
            "timesteps.per_image=2",
            f"prompts.sources={json.dumps(files)}",
            "prompts.mix={general: 1, ocr: 1}",
        ],
        *[
            "prompts.groups_per_epoch=2",
            "prompts.images_per_prompt=3",
            "rewards=[saturation, jpeg_compressibility, contrast]",
        ],
        *[
            "evaluation.sources={general: packaged, ocr: packaged}",
            "evaluation.steps=2",
            "evaluation.prompts_per_source=1",
        ],
        *["optimizer.micro_batch_size=4", "run.epochs=2", f"run.folder={tmp_path / 'run'}"],
    ]
    config = load_config("sd35-medium", overrides)
    policy = load_policy(config.model, seed=0, mixed_precision=config.run.mixed_precision)
    assert policy.dtype == torch.bfloat16
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    with RunFolder(config.run.folder) as folder:
        folder.write_config(config)
        trainer = NFTTrainer(
            config,
            policy=policy,
            rewards=load_rewards(config),
            prompts=training_prompts(config),
            evaluation_prompts=evaluation_prompts(config),
            optimizer=torch.optim.AdamW(policy.parameters.values(), lr=config.optimizer.lr),
            folder=folder,
        )
        trainer.fit()
    log = rows(trainer, "train")
    assert [row["collector"] for row in log] == ["linear", None]
    assert log[1]["kl"] > 0
    assert any(not torch.equal(p, before[name]) for name, p in policy.parameters.items())


@pytest.mark.parametrize("share", ["all", "half"])
def test_counting_missing_rewards_as_zero_dilutes_those_that_miss(make: Make, share: str) -> None:
    def brightness(images: torch.Tensor, prompts: list[str], **metadata: list[Any]) -> list[float | None]:
        scores = images.mean(dim=(1, 2, 3)).tolist()
        return [score if share == "all" or i % 2 else None for i, score in enumerate(scores)]

    masked, counted = (
        first_gradient(
            make(missing, f"loss.missing={missing}", "balance.method=mean", "optimizer.max_grad_norm=null",
                 rewards=RewardSet({"brightness": brightness}))
        )
        for missing in ("mask", "zero")
    )  # fmt: skip
    assert torch.linalg.vector_norm(masked) > 0
    # Old and new policy are the same here, so advantage 0 pulls nowhere: only the mean is over twice as many.
    torch.testing.assert_close(counted, masked if share == "all" else masked / 2, rtol=1e-4, atol=1e-7)
