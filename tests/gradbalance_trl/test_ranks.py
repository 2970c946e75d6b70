"""Two processes under DistributedDataParallel train one policy."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from rank_pool import RankPool

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA with penalty, accumulation and checkpointing": {
        "lora": True,
        "beta": 0.1,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    "off-policy": {"num_iterations": 2, "max_steps": 4, "learning_rate": 3e-2, "lora": True},
    "lagged": {
        "balance_refresh": "lagged",
        "lora": True,
        "beta": 0.1,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


def train(options: dict[str, Any]) -> tuple[list[float], list[bool], list[float], dict[str, Any]]:
    """Errors against the mean over ranks of the reference, refreshes, the trained weights, the state of the balance."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    from tiny_grpo import ReferenceTrainer, make_trainer

    # TRL and accelerate warn of names that transformers and torch have renamed.
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    AcceleratorState._reset_state(reset_partial_state=True)
    options = {"per_device_train_batch_size": 4, "ddp_backend": "gloo", **options}
    trainer = make_trainer(tempfile.mkdtemp(), ReferenceTrainer, **options)
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    weights = torch.cat([p.detach().flatten() for p in trainer.trained()])
    return trainer.errors, trainer.refreshed, weights.tolist(), trainer._balance.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_mean_over_ranks(pool: RankPool, case: str) -> None:
    first, second = pool.run(train, CASES[case])
    for errors, refreshed, _, _ in (first, second):
        assert max(errors) < 1e-5
        assert refreshed == [True, False, True, False][: len(errors)]
    assert first[2:] == second[2:]
