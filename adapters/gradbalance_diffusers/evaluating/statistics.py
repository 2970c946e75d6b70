"""Means, errors and comparisons over pictures that come several to a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean with its uncertainty.

    Attributes:
        mean: None without a value.
        se: Standard error over prompts; None with fewer than two prompts.
        low: Lower end of the 95 % confidence interval; None where ``se`` is.
        high: Its upper end.
        pictures: Number of values.
        prompts: Number of distinct prompts among them.
    """

    mean: float | None
    se: float | None
    low: float | None
    high: float | None
    pictures: int
    prompts: int


def clustered_mean(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    r"""Mean of all values, with a standard error that takes the values of one prompt as dependent.

    Pictures of one prompt resemble each other, so n pictures of G prompts say less than n pictures of n prompts. With
    :math:`\bar x` the mean of the n values and G clusters c,

    .. math:: SE^2 = \frac{G}{G-1} \sum_c \Big(\sum_{i \in c} (x_i - \bar x)\Big)^2 / n^2 ,

    the cluster-robust (sandwich) variance of a mean. With one picture per prompt it is the usual :math:`s/\sqrt n`,
    with the same number for each the standard error of the prompt means. The interval is
    :math:`\bar x \pm t_{0.975,\,G-1}\, SE`.

    Args:
        values: n finite numbers.
        clusters: The prompt of each, length n.

    >>> estimate = clustered_mean([1.0, 3.0, 5.0, 7.0], ["a", "a", "b", "b"])
    >>> estimate.mean, estimate.se, estimate.prompts
    (4.0, 2.0, 2)
    """
    x = np.asarray(values, dtype=np.float64)
    names, index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    n, g = len(x), len(names)
    if n == 0:
        return Estimate(None, None, None, None, 0, 0)
    mean = float(x.mean())
    if g < 2:
        return Estimate(mean, None, None, None, n, g)
    sums = np.bincount(index, weights=x - mean, minlength=g)
    se = math.sqrt(g / (g - 1) * float(sums @ sums)) / n
    half = float(stats.t.ppf(0.975, g - 1)) * se
    return Estimate(mean, se, mean - half, mean + half, n, g)


def composite_z(means: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    r"""One number per model: the mean over metrics of its z-score among the compared models.

    .. math:: \text{composite}_m = \frac{1}{K} \sum_k \frac{\bar R_{mk} - \mu_k}{\sigma_k}

    where :math:`\mu_k` and :math:`\sigma_k` are mean and standard deviation (divisor M - 1) of metric k over the M
    models. A metric that is the same for all models counts 0. Only metrics that every model has take part.

    It ranks the models that are compared and says nothing else: adding or removing a model changes everybody's number,
    every metric weighs the same, and differences far below their standard error count in full. With two models each
    metric gives :math:`\pm 1/\sqrt 2`, so the number only counts wins; with M models no z-score exceeds
    :math:`(M-1)/\sqrt M`.

    Args:
        means: By model and metric.

    Returns:
        By model; None for all with fewer than two models or no common metric.

    >>> composite_z({"a": {"x": 1.0, "y": 0.0}, "b": {"x": 2.0, "y": 0.0}, "c": {"x": 3.0, "y": 0.0}})
    {'a': -0.5, 'b': 0.0, 'c': 0.5}
    """
    names = list(means)
    metrics = [
        metric
        for metric in dict.fromkeys(metric for row in means.values() for metric in row)
        if all(means[name].get(metric) is not None for name in names)
    ]
    if len(names) < 2 or not metrics:
        return dict.fromkeys(names)
    table = np.array([[means[name][metric] for metric in metrics] for name in names], dtype=np.float64)
    spread = table.std(axis=0, ddof=1)
    # What is equal for all may still differ by rounding.
    flat = spread <= 1e-12 * np.abs(table).max(axis=0)
    z = np.where(flat, 0.0, (table - table.mean(axis=0)) / np.where(flat, 1.0, spread))
    return dict(zip(names, z.mean(axis=1).tolist(), strict=True))
