"""Several processes that train one model: rows averaged over ranks, the same weights on all. See :class:`Ranks`."""

from .ranks import Ranks, world_size
from .samples import gather_samples, global_counts, mean_metrics

__all__ = ["Ranks", "gather_samples", "global_counts", "mean_metrics", "world_size"]
