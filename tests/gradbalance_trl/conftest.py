from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

import tiny_grpo
from tiny_policy import tiny_tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # TRL 1.16 still uses names that transformers 5 has renamed; nothing of ours can change that.
    renamed = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(renamed)


@pytest.fixture(autouse=True)
def _own_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TrainingArguments puts the precision into the environment, accelerate into a singleton, for all that follows."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def make_trainer(tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """``make(cls, rewards, lora=..., trainer_options=..., **options of the config)``."""
    return partial(tiny_grpo.make_trainer, str(tmp_path), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def reference_trainer() -> type:
    return tiny_grpo.ReferenceTrainer


@pytest.fixture(scope="session")
def reward_functions() -> dict[str, Any]:
    return {function.__name__: function for function in (tiny_grpo.digits, tiny_grpo.letters, tiny_grpo.sometimes)}
