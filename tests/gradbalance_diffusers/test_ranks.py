"""Training on several ranks is the training on one: the same rewards, steps, evaluations, and files of rank 0 alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradbalance as gb
from gradbalance_diffusers import assembly
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.dry_run import dry_run
from gradbalance_diffusers.first_rank import open_run_folder
from gradbalance_diffusers.share import Share
from gradbalance_diffusers.trainer import NFTTrainer
from rank_pool import RankPool
from run_records import assert_close, logged
from small_run import SMALL

# 12 pictures of 3 prompts an epoch, and one prompt to an optimizer step: steps 1 ... 12, checkpoints at 6 and 12.
OPTIONS = [
    "rewards=[saturation, contrast, {name: quoted, kind: 'quoted_reward:QuotedBrightness'}]",
    "optimizer.steps_per_epoch=3",
    "optimizer.micro_batch_size=2",
    "optimizer.max_grad_norm=null",
    "loss.kl_weight=0.01",
    "balance.measure_conflicts=true",
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def alone(pipeline_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The training of one process, and its folder."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return train(pipeline_path, folder, OPTIONS), folder


def train(pipeline: Path, folder: Path, options: list[str], resume: bool = False, uneven: bool = False) -> Any:
    """Train on all ranks there are; where this one began and what it has in the end.

    Args:
        pipeline: The small SD3.
        folder: Of the run.
        options: Of the configuration.
        resume: Continue what is in the folder.
        uneven: Give every rank but the first a single sample.
    """
    ranks = gb.distributed.Ranks("average")
    config = load_config("tiny", [*SMALL, f"model.path={pipeline}", *options])
    assembly.configure_torch(config.run)
    policy = assembly.load_policy(config.model, seed=config.run.seed, mixed_precision=config.run.mixed_precision)
    start = {name: p.detach().clone() for name, p in policy.parameters.items()}
    with open_run_folder(folder, ranks, resume=resume) as run:
        run.write_config(config)
        trainer = NFTTrainer(
            config,
            policy=policy,
            rewards=assembly.load_rewards(config),
            prompts=assembly.training_prompts(config),
            evaluation_prompts=assembly.evaluation_prompts(config),
            optimizer=assembly.make_optimizer(config.optimizer, policy),
            folder=run,
            ranks=ranks,
        )
        if resume:
            trainer.resume()
        first = trainer.epoch
        with mock.patch.object(Share, "_of", dealt_unevenly if uneven else Share._of):
            trainer.fit()
    average = trainer.update.state_dict()["ema"]["average"]
    return {
        "first epoch": first,
        "moved": flat({name: p.detach() - start[name] for name, p in policy.parameters.items()}),
        "weights": [flat(policy.parameters), flat(policy.old_parameters), flat(average)],
    }


def try_out(pipeline: Path, folder: Path, absent: bool) -> tuple[dict[str, str | None], dict[str, str]]:
    """Faults and details of a dry run; rank 1 may lack the model."""
    ranks = gb.distributed.Ranks("average")
    path = folder / "absent" if absent and ranks.rank == 1 else pipeline
    options = [*SMALL, f"model.path={path}", f"run.folder={folder}"]
    checks = dry_run(load_config("tiny", options), ranks=ranks).checks
    faults = {check.name: check.fault for check in checks if check.fault is not None}
    return faults, {check.name: check.detail for check in checks}


def test_a_dry_run_lists_the_faults_of_all(pool: RankPool, pipeline_path: Path, tmp_path: Path) -> None:
    for faults, details in pool.run(try_out, pipeline_path, tmp_path / "run", False):
        assert not faults
        assert "rows by linear" in details["optimizer step"]
    (first, details), (second, _) = pool.run(try_out, pipeline_path, tmp_path / "run", True)
    assert set(first) == {"rank 1: model"}
    assert set(second) == {"model"}
    assert "on every rank" in details["optimizer step"]


def dealt_unevenly(share: Share, rank: int) -> torch.Tensor:
    others = share.ranks.size - 1
    last = share.order[len(share.order) - others :]
    return share.order[:-others].sort().values if rank == 0 else last[rank - 1 : rank]


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def assert_same(results: list[Any], folder: Path, alone: tuple[dict[str, Any], Path]) -> None:
    """Bit for bit on all ranks; but for rounding, which Adam and a solve amplify, as on one."""
    for weights in zip(*(result["weights"] for result in results), strict=True):
        assert all(torch.equal(other, weights[0]) for other in weights)
    expected, expected_folder = alone
    difference = torch.linalg.vector_norm(results[0]["moved"] - expected["moved"])
    assert difference < 1e-3 * torch.linalg.vector_norm(expected["moved"])
    assert_close(logged(folder), logged(expected_folder))
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in (folder, expected_folder)]
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def on_two(
    pool: RankPool, pipeline_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """The same training on two ranks."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return pool.run(train, pipeline_path, folder, OPTIONS), folder


def test_two_ranks_train_as_one(on_two: tuple[list[Any], Path], alone: tuple[dict[str, Any], Path]) -> None:
    results, folder = on_two
    assert_same(results, folder, alone)
    rows = [row for row in logged(folder) if row.get("kind") == "train"]
    assert [row["refreshed"] for row in rows] == [True, False] * 6
    assert all(0 < row["valid"]["quoted"] < 12 for row in rows)


def test_uneven_shares_and_ranks_without_samples_in_a_step(
    pool: RankPool, alone: tuple[dict[str, Any], Path], pipeline_path: Path, tmp_path: Path
) -> None:
    results = pool.run(train, pipeline_path, tmp_path / "run", OPTIONS, False, True)
    assert_same(results, tmp_path / "run", alone)


def cut_back(source: Path, target: Path) -> Path:
    """A copy of a run as its first checkpoint left it, with later rows in the logs."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / "step-000012")
    return target


def test_a_run_of_one_process_continues_on_two(
    pool: RankPool, alone: tuple[dict[str, Any], Path], pipeline_path: Path, tmp_path: Path
) -> None:
    folder = cut_back(alone[1], tmp_path / "run")
    results = pool.run(train, pipeline_path, folder, OPTIONS, True)
    assert [result["first epoch"] for result in results] == [2, 2]
    assert_same(results, folder, alone)


def test_a_run_of_two_ranks_continues_on_one(
    on_two: tuple[list[Any], Path], alone: tuple[dict[str, Any], Path], pipeline_path: Path, tmp_path: Path
) -> None:
    folder = cut_back(on_two[1], tmp_path / "run")
    result = train(pipeline_path, folder, OPTIONS, resume=True)
    assert result["first epoch"] == 2
    assert_same([result], folder, alone)


@pytest.mark.slow
def test_four_ranks_with_fewer_held_out_prompts_than_ranks(pipeline_path: Path, tmp_path: Path) -> None:
    """Prompts of two pictures: in no step has every rank a sample. (Rows of two pictures are parallel, so the weights
    are not solved for.)
    """
    options = [*OPTIONS, "prompts.images_per_prompt=2", "evaluation.prompts_per_source=1", "balance.method=mean"]
    expected = train(pipeline_path, tmp_path / "alone", options), tmp_path / "alone"
    pool = RankPool(4, tmp_path)
    try:
        assert_same(pool.run(train, pipeline_path, tmp_path / "four", options), tmp_path / "four", expected)
    finally:
        pool.stop()


def test_more_ranks_than_pictures_are_refused(pool: RankPool, pipeline_path: Path, tmp_path: Path) -> None:
    one = ["prompts.groups_per_epoch=1", "prompts.mix={ocr: 1}", "prompts.images_per_prompt=2"]
    ranks = mock.Mock(spec=gb.distributed.Ranks, size=3, rank=0)
    with (
        mock.patch.object(gb.distributed, "Ranks", return_value=ranks),
        pytest.raises(gb.InvalidArgumentError, match="2 pictures for 3 processes"),
    ):
        train(pipeline_path, tmp_path / "run", [*OPTIONS[:1], *one])
