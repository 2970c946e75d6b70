"""Every file, model, prompt set and reward of a configuration tried on a few samples, with the run folder untouched."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradbalance as gb

from .advantages import Advantages
from .assembly import evaluation_prompts, load_policy, make_optimizer, training_prompts
from .balance import WEIGHTED_SUM
from .checklist import Check, Checklist, joined
from .config import Config
from .embeddings import PromptEncoder, SampleEmbeddings
from .estimate import estimate_table, present_gpu
from .memory_estimate import samples_per_process
from .model_shapes import shapes_of
from .nft import optimality
from .policy import SD3Policy
from .prompts import Prompt, StratifiedSampler, load_sources
from .rewards import Reward, RewardSet, make_reward
from .rollout import Rollout, roll_out
from .run_folder import check_run_folder
from .stages import plan_stages
from .timesteps import TimestepSampler
from .trackers import require_tracker
from .update import EpochData, PolicyUpdate


def dry_run(
    config: Config, *, resume: bool = False, overwrite: bool = False, ranks: gb.distributed.Ranks | None = None
) -> Checklist:
    """Check everything that a run of ``config`` needs, and find all faults rather than the first.

    Prompts are read in full; the model is loaded and samples one batch with prompts of all sources; every reward scores
    one picture of every source; one micro-batch of one noise level makes an optimizer step with gradients per reward,
    which needs as much memory as training does. Nothing is written.

    Args:
        config: The whole configuration.
        resume: The run is to continue what its folder holds.
        overwrite: The run is to replace what its folder holds.
        ranks: That are to train together; each makes the checks, and only the first looks at the folder. The list of
            each has the faults of all. None for all there are.

    Raises:
        GradBalanceError: On several ranks, a fault in the optimizer step, in which the others wait.
    """
    ranks = ranks or gb.distributed.Ranks("average")
    checks = Checklist()
    folder = Path(config.run.folder)
    if ranks.rank == 0:
        with checks.check("run folder") as made:
            made.detail = check_run_folder(folder, resume=resume, overwrite=overwrite)
    for tracker in config.run.trackers:
        checks.value(f"tracker {tracker}", lambda name=tracker: require_tracker(name))
    prompts = _check_prompts(config, checks)
    rewards = {}
    for reward in config.rewards:
        with checks.check(f"reward {reward.name}") as made:
            rewards[reward.name] = make_reward(reward.scorer, **reward.options)
            made.detail = reward.scorer

    policy = checks.value(
        "model",
        lambda: load_policy(config.model, seed=config.run.seed, mixed_precision=config.run.mixed_precision),
        lambda policy: f"{config.model.path} on {policy.device}, {len(policy.parameters)} LoRA tensors",
    )
    rollout = None
    if policy is not None:
        with checks.check("estimate") as made:
            table = estimate_table(shapes_of(policy, config.model), config, gpu=present_gpu(), gpus=ranks.size)
            print(table, end="\n\n")
            made.detail = "above"
    if policy is not None and prompts:
        with checks.check("sampling") as made:
            rollout = _sample(config, policy, prompts, ranks, made)
    else:
        checks.skip("sampling", "the model and prompts")
    for name in config.reward_names:
        if name not in rewards or rollout is None:
            checks.skip(f"scores of {name}", "pictures" if name in rewards else "the reward")
        else:
            with checks.check(f"scores of {name}") as made:
                _score(config, name, rewards[name], rollout, made)
    everywhere = _compare(checks, ranks, ready=rollout is not None)
    if policy is not None and rollout is not None and everywhere:
        with checks.check("optimizer step") as made:
            _step(config, policy, rollout, ranks, made)
        if made.fault is not None and ranks.several:
            raise gb.GradBalanceError(f"The dry run found faults.\n{checks.table()}")  # the others wait in the step
    else:
        checks.skip("optimizer step", "pictures" + " on every rank" * ranks.several)
    return checks


def _compare(checks: Checklist, ranks: gb.distributed.Ranks, *, ready: bool) -> bool:
    """Add what only other ranks have found wrong; returns whether all are ready for a step together. Collective."""
    if not ranks.several:
        return ready
    own = {check.name: check.fault for check in checks.checks if check.fault is not None}
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(told, (ready, own), group=ranks.group)
    for rank, (_, faults) in enumerate(told):
        checks.checks += [
            Check(f"rank {rank}: {name}", fault=fault) for name, fault in faults.items() if name not in own
        ]
    return all(one_is_ready for one_is_ready, _ in told)


def _check_prompts(config: Config, checks: Checklist) -> dict[str, list[Prompt]]:
    """Every source of both halves by itself, then the halves together and the draw of an epoch.

    Returns:
        Training prompts of the sources that some stage draws on; none after a fault.
    """
    before = checks.faults
    for name, sources, split in (
        ("training prompts", config.prompts.sources, "train"),
        ("held-out prompts", config.evaluation.sources, "test"),
    ):
        for source, place in sources.items():
            checks.value(
                f"{name}: {source}",
                lambda one={source: place}, half=split: load_sources(one, half),
                lambda loaded, place=place: f"{len(next(iter(loaded.values())))} in {place}",
            )
    if checks.faults > before:
        checks.skip("prompts of an epoch", "all prompts")
        return {}
    drawn: dict[str, list[Prompt]] = {}
    with checks.check("prompts of an epoch") as made:
        prompts = training_prompts(config)
        evaluation_prompts(config)
        counts = []
        for stage in plan_stages(config, config.reward_names):
            sampler = StratifiedSampler(
                prompts, stage.mix, config.prompts.groups_per_epoch, config.prompts.images_per_prompt, config.run.seed
            )
            counts.append(joined(sampler.source_counts))
            drawn |= {source: prompts[source] for source in stage.mix}
        made.detail = "; ".join(dict.fromkeys(counts))
    return drawn


def _sample(
    config: Config,
    policy: SD3Policy,
    prompts: Mapping[str, list[Prompt]],
    ranks: gb.distributed.Ranks,
    made: Check,
) -> Rollout:
    """One batch of pictures, the first prompts of all sources in turn."""
    encoder = PromptEncoder(policy)
    if config.model.text_encoders == "offload":
        encoder.offload()
    sources = list(prompts.values())
    number = max(len(sources), config.sampling.batch_size)
    chosen = [sources[i % len(sources)][i // len(sources) % len(sources[i % len(sources)])] for i in range(number)]
    encoder.encode([prompt.text for prompt in chosen])
    _reset_peak(policy)
    started = time.perf_counter()
    with policy.role("old"):
        rollout = roll_out(
            policy,
            encoder,
            RewardSet({"none": lambda images, prompts, **metadata: [0.0] * len(images)}),
            chosen,
            list(range(number)),
            replace(config.sampling, batch_size=number),
            size=(config.model.height, config.model.width),
            keep_images=True,
        )
    seconds = time.perf_counter() - started
    if not bool(rollout.latents.isfinite().all()):
        raise gb.NonFiniteError("Sampled latents must be finite. Found NaN or Inf. Try another model.dtype.")
    epoch = seconds * samples_per_process(config, ranks.size) / number
    made.detail = f"{number} pictures in {seconds:.1f} s{_peak(policy)}; {_span(epoch)} an epoch"
    return rollout


def _score(config: Config, name: str, reward: Reward, rollout: Rollout, made: Check) -> None:
    """One picture of every source under one reward; it must apply to one source at least."""
    first = {prompt.source: i for i, prompt in reversed(list(enumerate(rollout.prompts)))}
    index = list(first.values())
    rewards = RewardSet({name: reward}, workers=1, timeout=config.run.reward_timeout)
    prompts = [rollout.prompts[i] for i in index]
    assert rollout.images is not None
    table = rewards(
        rollout.images[index],
        [prompt.text for prompt in prompts],
        [{"source": prompt.source, **prompt.metadata} for prompt in prompts],
    )
    if table.errors[name]:
        raise gb.GradBalanceError(f"{table.errors[name]} of {len(index)} scores were lost; the warning says why.")
    if not bool(table.mask.any()):
        raise gb.GradBalanceError(
            f"The reward must apply to a prompt of some source. Found none among {', '.join(first)}. Add the prompts "
            "that it is for, or leave it out."
        )
    scores = {
        source: f"{float(table.values[row, 0]):.3f}" if table.mask[row, 0] else "-" for row, source in enumerate(first)
    }
    made.detail = joined(scores)


def _step(config: Config, policy: SD3Policy, rollout: Rollout, ranks: gb.distributed.Ranks, made: Check) -> None:
    """One micro-batch at one noise level, with pictures that are good or bad by chance under every reward."""
    stage = plan_stages(config, config.reward_names)[0]
    pictures = samples_per_process(config, ranks.size)
    samples = config.optimizer.micro_batch_size or max(1, pictures // config.optimizer.steps_per_epoch)
    place = torch.arange(samples) % len(rollout.prompts)
    embeddings = SampleEmbeddings(rollout.embeddings.distinct, rollout.embeddings.rows[place])
    names = ["sum"] if stage.method == WEIGHTED_SUM else list(stage.rewards)
    draws = TimestepSampler.from_config(policy, config.timesteps, config.sampling.steps).draw(place, (config.run.seed,))
    values = torch.randn(samples, len(names), generator=torch.Generator().manual_seed(config.run.seed))
    data = EpochData(
        rollout=replace(rollout, latents=rollout.latents[place], embeddings=embeddings),
        names=names,
        advantages=_all_defined(values),
        r=optimality(values, config.loss.advantage_clip),
        draws=replace(draws, sigma=draws.sigma[:, :1]),
    )
    update = PolicyUpdate(config, policy, make_optimizer(config.optimizer, policy), total_steps=1, ranks=ranks)
    update.enter_stage(stage)
    _reset_peak(policy)
    started = time.perf_counter()
    result = update.step(data, torch.arange(samples))
    seconds = time.perf_counter() - started
    if not math.isfinite(result.grad_norm):
        raise gb.NonFiniteError(f"The gradient must be finite. Found a norm of {result.grad_norm}.")
    epoch = seconds * pictures * config.timesteps.per_image / samples
    rows_by = f"; rows by {result.info.collector}" if result.info.collector else ""
    made.detail = (
        f"{samples} pictures in {seconds:.1f} s{_peak(policy)}; at most {_span(epoch)} an epoch{rows_by}; "
        f"gradient norm {result.grad_norm:.3g}"
    )


def _all_defined(values: Tensor) -> Advantages:
    nothing = torch.zeros(values.shape[1], dtype=torch.int64)
    return Advantages(values, torch.ones_like(values, dtype=torch.bool), nothing, nothing)


def _reset_peak(policy: SD3Policy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)
        torch.cuda.reset_peak_memory_stats(policy.device)


def _peak(policy: SD3Policy) -> str:
    if policy.device.type != "cuda":
        return ""
    return f", {torch.cuda.max_memory_allocated(policy.device) / 2**30:.1f} GiB at most"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
