"""Second step of an evaluation: one number per picture and metric."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from gradbalance.errors import InvalidArgumentError

from ..prompts import Prompt
from ..rewards import RewardSet, make_reward
from ..sections import RewardConfig
from .folder import EvaluationFolder, Score
from .work import Picture, batches, missing


def score(
    folder: EvaluationFolder,
    metrics: Sequence[RewardConfig],
    models: Sequence[str] = (),
    *,
    batch_size: int = 16,
) -> dict[str, str]:
    """Score the pictures that are there and have no score yet.

    One metric after the other: its model is loaded, scores the pictures of every evaluated model, and is freed, so that
    the largest of them has to fit, not their sum. Metrics see the pictures as they lie on the disk, in 8 bits. One that
    fails does not keep the others from scoring, and what it has scored before is kept.

    Args:
        folder: An evaluation with pictures.
        metrics: What to score; any reward is a metric.
        models: Names of evaluated models; none means all of them.
        batch_size: Pictures per call of a metric.

    Returns:
        By metric, what went wrong: it could not be made, it raised, or some of its scores were lost (a server that did
        not answer). What is missing is asked for again next time.

    Raises:
        InvalidArgumentError: The folder holds no pictures, or not of such a model.
        StateError: A metric's name stands for another one in this folder.
    """
    prompts = folder.prompts()
    names = list(models) or folder.models()
    for name in names:
        folder.manifest(name)  # raises if it is not there
    if not any(folder.pictures(name) for name in names):
        raise InvalidArgumentError(f"The evaluation {folder.path} must hold pictures to score. Found none.")
    folder.add_metrics(metrics)
    problems = {}
    for metric in metrics:
        todo = {name: _unscored(folder, name, metric.name, batch_size, len(prompts)) for name in names}
        if any(todo.values()):
            try:
                if lost := _score_with(metric, folder, prompts, todo):
                    problems[metric.name] = f"{lost} scores were lost."
            except Exception as error:  # whatever it is (no memory, a bug), the other metrics are to score
                problems[metric.name] = f"{type(error).__name__}: {error}"
            # The model of this metric goes before that of the next one comes.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return problems


def _score_with(
    metric: RewardConfig,
    folder: EvaluationFolder,
    prompts: Sequence[Prompt],
    todo: dict[str, list[list[Picture]]],
) -> int:
    """Make the metric, score all models, and count the scores that were lost."""
    reward = RewardSet({metric.name: make_reward(metric.scorer, **metric.options)}, on_error=metric.on_error)
    lost = 0
    for model, work in todo.items():
        done = {score.picture for score in folder.scores(model, metric.name)}
        description = f"{model}: {metric.name}"
        with tqdm(total=sum(map(len, work)), desc=description, dynamic_ncols=True, disable=not work) as progress:
            for batch in work:
                images = torch.stack([read_picture(folder, model, picture) for picture in batch])
                rows: list[dict[str, Any]] = []
                for picture in batch:
                    prompt = prompts[picture.prompt]
                    rows.append({"source": prompt.source, **prompt.metadata})
                table = reward(images, [prompts[picture.prompt].text for picture in batch], rows)
                lost += int(table.lost.sum())
                found = zip(batch, table.values[:, 0].tolist(), table.lost[:, 0].tolist(), strict=True)
                scores = [Score(picture, value) for picture, value, gone in found if not gone and picture not in done]
                folder.append_scores(model, metric.name, scores)
                progress.update(len(batch))
    return lost


def read_picture(folder: EvaluationFolder, model: str, picture: Picture) -> Tensor:
    """A picture from the disk, ``[3, H, W]`` float32 in [0, 1]."""
    with Image.open(folder.image_path(model, picture)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def _unscored(folder: EvaluationFolder, model: str, metric: str, batch_size: int, prompts: int) -> list[list[Picture]]:
    """Batches with at least one picture without a score; as in sampling, their composition stays what it is."""
    there = folder.pictures(model)
    samples = 1 + max((picture.sample for picture in there), default=0)
    work = [[p for p in batch if p in there] for batch in batches(prompts, samples, batch_size)]
    return missing(work, {score.picture for score in folder.scores(model, metric)})
