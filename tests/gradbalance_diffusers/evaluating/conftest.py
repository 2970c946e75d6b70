"""A small trained run, evaluation folders with made-up scores, and metrics that count what they are asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from gradbalance_diffusers.evaluating.folder import EvaluationFolder, Score
from gradbalance_diffusers.evaluating.generate import Sampling
from gradbalance_diffusers.evaluating.work import Picture
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.prompts import Prompt
from gradbalance_diffusers.sections import ModelConfig, RewardConfig

ROOT = Path(__file__).resolve().parents[3]

TRAINING = [
    "model.height=16",
    "model.width=16",
    "model.lora_rank=4",
    "model.device=cpu",
    "sampling.steps=2",
    "sampling.batch_size=4",
    "prompts.sources={general: tiny, ocr: tiny}",
    "prompts.mix={general: 1, ocr: 1}",
    "prompts.groups_per_epoch=2",
    "prompts.images_per_prompt=4",
    "rewards=[saturation, contrast]",
    "evaluation.sources={general: tiny, ocr: tiny}",
    "evaluation.prompts_per_source=3",
    "evaluation.saved_images=3",
    "evaluation.steps=2",
    "evaluation.every=9",
    "run.epochs=3",
    "run.checkpoint_every=1",
    "run.report_every=9",
]


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, pipeline_path: Path) -> Path:
    """Folder of a run of three epochs on a random pipeline, made by the training example itself."""
    folder = tmp_path_factory.mktemp("runs") / "marble"
    with pytest.MonkeyPatch.context() as patch:
        options = ["--preset", "tiny", "--output", str(folder), f"model.path={pipeline_path}", *TRAINING]
        patch.setattr(sys, "argv", ["sd35_marble.py", *options])
        run_path(str(ROOT / "examples" / "sd35_marble.py"), run_name="__main__")
    return folder


@pytest.fixture
def model(pipeline_path: Path) -> ModelConfig:
    """The random pipeline as a base model."""
    return ModelConfig(path=str(pipeline_path), load_t5=False, max_sequence_length=0, height=16, width=16, device="cpu")


@pytest.fixture
def sampling() -> Sampling:
    return Sampling(steps=2, solver="euler", guidance_scale=1.0, seed=50, height=16, width=16)


@pytest.fixture
def prompts() -> list[Prompt]:
    return [
        Prompt("a cat", "general"),
        Prompt('a sign "42"', "ocr"),
        Prompt("two dogs", "geneval", {"tag": "counting", "include": [{"class": "dog", "count": 2}]}),
    ]


@pytest.fixture
def lora_path(tmp_path: Path, load_random_policy: Callable[..., SD3Policy]) -> Path:
    """Folder of a random LoRA as diffusers saves it."""
    folder = tmp_path / "lora"
    load_random_policy().save_lora(folder)
    return folder


class Recorded:
    """A metric that says how bright a picture is; every batch it was asked for is kept."""

    calls: ClassVar[list[list[str]]] = []  # of the class, so that they survive the metric
    limit: ClassVar[float] = float("inf")

    def __init__(self, **options: object) -> None:
        pass

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: list[object]) -> list[float | None]:
        if len(self.calls) >= self.limit:
            raise RuntimeError("no more than this")
        self.calls.append(prompts)
        sources = metadata["source"]
        means = images.mean(dim=(1, 2, 3)).tolist()
        return [None if source == "ocr" else mean for mean, source in zip(means, sources, strict=True)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """The class, importable as ``recorded_metric:Recorded`` and with nothing recorded."""
    monkeypatch.setattr(Recorded, "calls", [])
    module = ModuleType("recorded_metric")
    module.Recorded = Recorded
    monkeypatch.setitem(sys.modules, "recorded_metric", module)
    return Recorded


@pytest.fixture
def metric() -> Callable[..., RewardConfig]:
    """A function that makes the configuration of a recorded metric."""

    def make(name: str, **options: object) -> RewardConfig:
        return RewardConfig(name=name, kind="recorded_metric:Recorded", options=options)

    return make


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., EvaluationFolder]:
    """A function that makes a folder with pictures of noise and the scores given by model and metric."""

    def make(
        prompts: Sequence[Prompt],
        scores: Mapping[str, Mapping[str, Mapping[tuple[int, int], float | None]]],
        kinds: Mapping[str, str] | None = None,
        size: int = 16,
    ) -> EvaluationFolder:
        folder = EvaluationFolder(tmp_path / "evaluation")
        folder.write_prompts(prompts)
        settings = {
            "model.path": "some/model",
            "model.dtype": "float32",
            "sampling.steps": 4,
            "sampling.solver": "euler",
            "sampling.guidance_scale": 1.0,
            "sampling.width": size,
            "sampling.height": size,
        }
        names = list(dict.fromkeys(name for metrics in scores.values() for name in metrics))
        folder.add_metrics([RewardConfig(name=name, kind=(kinds or {}).get(name)) for name in names])
        rng = np.random.default_rng(0)
        for model, metrics in scores.items():
            folder.add_model(model, settings, {"kind": "base"})
            pictures = sorted({key for rows in metrics.values() for key in rows})
            for prompt, sample in pictures:
                path = folder.image_path(model, Picture(prompt, sample))
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(path)
            for name, rows in metrics.items():
                folder.append_scores(model, name, [Score(Picture(*key), value) for key, value in rows.items()])
        return folder

    return make
