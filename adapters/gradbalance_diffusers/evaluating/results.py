"""Third step of an evaluation: what the scores say, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from gradbalance.errors import InvalidArgumentError

from ..prompts import Prompt
from .folder import EvaluationFolder
from .statistics import Estimate, clustered_mean, composite_z
from .work import Picture

Values = dict[Picture, float]


class Results:
    """Summaries of an evaluation, scored as far as it is.

    Args:
        folder: The evaluation.
        models: Names of the models to compare, the first being what the others are compared with; none means all, in
            the order in which they were added.

    Attributes:
        models: Names of the compared models.
        metrics: Metrics with at least one value.
        without_value: The other metrics of the folder: not scored yet, or applying to no picture.
        prompts: The prompts.
        manifests: By model, what its pictures were made with.

    Raises:
        InvalidArgumentError: No such evaluation or model, or nothing scored.
    """

    def __init__(self, folder: EvaluationFolder, models: Sequence[str] = ()) -> None:
        self.folder = folder
        self.prompts: list[Prompt] = folder.prompts()
        self.models = list(models) or folder.models()
        self.manifests = {name: folder.manifest(name) for name in self.models}
        rows = {(m, k): folder.scores(m, k) for m in self.models for k in folder.metrics()}
        self._values: dict[tuple[str, str], Values] = {
            key: {score.picture: score.value for score in scores if score.value is not None}
            for key, scores in rows.items()
        }
        self._scored = {key: len(scores) for key, scores in rows.items()}
        self.metrics = [k for k in folder.metrics() if any(self._values[m, k] for m in self.models)]
        self.without_value = [k for k in folder.metrics() if k not in self.metrics]
        if not self.metrics:
            raise InvalidArgumentError(
                f"The evaluation {folder.path} must hold scores to report. Found none of {self.models or 'any model'}. "
                "Score the pictures first (--only score)."
            )

    def kind(self, metric: str) -> str:
        """What scores a metric."""
        kind: str = self.folder.metrics()[metric]["kind"]
        return kind

    def values(self, model: str, metric: str) -> Values:
        """Score of every picture that the metric applies to."""
        return self._values[model, metric]

    def estimate(self, model: str, metric: str) -> Estimate:
        """Mean score with its error."""
        return self._clustered(self._values[model, metric])

    def change(self, model: str, metric: str) -> Estimate:
        """Mean paired difference to the first model, over the pictures that both have a score of.

        Both pictures of a pair have the same prompt and start from the same noise, so that the difference is known
        better than either mean.
        """
        first, own = self._values[self.models[0], metric], self._values[model, metric]
        return self._clustered({picture: own[picture] - first[picture] for picture in own if picture in first})

    def unscored(self, model: str, metric: str) -> int:
        """Pictures that are there and that the metric has not seen, or whose score was lost."""
        return self._picture_counts[model] - self._scored[model, metric]

    @cached_property
    def composite(self) -> dict[str, float | None]:
        """See :func:`~gradbalance_diffusers.evaluating.statistics.composite_z`."""
        means = {m: {k: self.estimate(m, k).mean for k in self.metrics} for m in self.models}
        return composite_z(means)

    def tags(self, model: str, metric: str) -> dict[str, Estimate]:
        """Means per ``tag`` of the prompts' metadata, which names the six tasks of GenEval.

        Empty for a metric that also applies to prompts without a tag.
        """
        groups: dict[Any, Values] = {}
        for picture, value in self._values[model, metric].items():
            groups.setdefault(self.prompts[picture.prompt].metadata.get("tag"), {})[picture] = value
        if None in groups:
            return {}
        return {tag: self._clustered(groups[tag]) for tag in sorted(groups)}

    def as_json(self) -> dict[str, Any]:
        """Everything above as plain values, in the units of the metrics."""
        return {
            "prompts": len(self.prompts),
            "compared_with": self.models[0],
            "metrics": {k: self.folder.metrics()[k] for k in self.metrics},
            "models": [self._model(name) for name in self.models],
        }

    def _model(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = {
            "name": name,
            "settings": self.manifests[name]["settings"],
            "notes": self.manifests[name]["notes"],
            "pictures": self._picture_counts[name],
            "composite": self.composite[name],
            "scores": {},
        }
        for metric in self.metrics:
            entry = asdict(self.estimate(name, metric)) | {"unscored": self.unscored(name, metric)}
            if name != self.models[0]:
                entry["change"] = asdict(self.change(name, metric))
            if tags := self.tags(name, metric):
                entry["tags"] = {tag: asdict(estimate) for tag, estimate in tags.items()}
            record["scores"][metric] = entry
        return record

    @cached_property
    def _picture_counts(self) -> dict[str, int]:
        return {name: len(self.folder.pictures(name)) for name in self.models}

    def _clustered(self, values: Values) -> Estimate:
        pictures = sorted(values, key=lambda picture: (picture.sample, picture.prompt))
        return clustered_mean([values[p] for p in pictures], [self.prompts[p.prompt].text for p in pictures])
