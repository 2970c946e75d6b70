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
) -> dict[str, int]:
    """Score the pictures that are there and have no score yet.

    One metric after the other: its model is loaded, scores the pictures of every evaluated model, and is freed, so that
    the largest of them has to fit, not their sum. Metrics see the pictures as they lie on the disk, in 8 bits.

    Args:
        folder: An evaluation with pictures.
        metrics: What to score; any reward is a metric.
        models: Names of evaluated models; none means all of them.
        batch_size: Pictures per call of a metric.

    Returns:
        By metric, how many scores were lost (a server that did not answer). They are asked for again next time.

    Raises:
        InvalidArgumentError: The folder holds no pictures, or not of such a model; a metric that cannot be made.
        RewardError: A metric raised. What it has scored before is kept.
        StateError: A metric's name stands for another one in this folder.
    """
    prompts = folder.prompts()
    names = list(models) or folder.models()
    for name in names:
        folder.manifest(name)  # raises if it is not there
    if not any(folder.pictures(name) for name in names):
        raise InvalidArgumentError(f"The evaluation {folder.path} must hold pictures to score. Found none.")
    folder.add_metrics(metrics)
    lost = {}
    for metric in metrics:
        todo = {name: _unscored(folder, name, metric.name, batch_size, len(prompts)) for name in names}
        if any(todo.values()):
            lost[metric.name] = _score_with(metric, folder, prompts, todo)
            # The model of this metric goes before that of the next one comes.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return lost


def _score_with(
    metric: RewardConfig,
    folder: EvaluationFolder,
    prompts: Sequence[Prompt],
    todo: dict[str, list[list[Picture]]],
) -> int:
    """Make the metric, score all models, and count the scores that were lost."""
    reward = RewardSet({metric.name: make_reward(metric.scorer, **metric.options)})
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
                failed = table.errors.get(metric.name, 0)
                lost += failed
                found = zip(batch, table.values[:, 0].tolist(), table.mask[:, 0].tolist(), strict=True)
                scores = [Score(picture, value if applies else None) for picture, value, applies in found]
                # Which of the missing ones were lost and which do not apply is not told apart: ask again for all.
                kept = [s for s in scores if s.picture not in done and (s.value is not None or not failed)]
                folder.append_scores(model, metric.name, kept)
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
