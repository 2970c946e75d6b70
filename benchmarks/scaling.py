"""Paper and pencil: what rows, their average and the one gradient cost on many ranks. ``python -m benchmarks.scaling``.

Time of a collective over W ranks on n bytes per rank, in a ring of links with b bytes per second and a seconds per hop:

    reduce-scatter or all-gather:  (W - 1) / W * n / b + (W - 1) a,        all-reduce: twice that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.report import Table
from gradbalance.distributed.collectives import BUCKET
from gradbalance.distributed.mean_rows import PIECES

BYTES = 4
OBJECTIVES = 5
HOP = 3e-6
# Each of the small exchanges of a cycle goes up and down a tree.
SMALL = 10e-6
LINKS = {"300 GB/s": 300e9, "10 GB/s": 10e9}
DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Cost:
    """Seconds, by what bounds them."""

    bandwidth: float
    latency: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.bandwidth + self.latency


def refresh(parameters: float, ranks: int, link: float, *, scatter: bool = True, extra: bool = True) -> Cost:
    """A refresh: K rows, one more for ``extra_loss``, and the combined gradient."""
    rows = OBJECTIVES + extra
    pieces = math.ceil(rows * parameters / max(BUCKET, rows * parameters / PIECES))
    share = (ranks - 1) / ranks * BYTES * parameters / link
    hops = (ranks - 1) * HOP
    small = 3 * SMALL * 2 * math.log2(ranks)
    times = 1 if scatter else 2
    return Cost((times * rows + 1) * share, (times + 1) * pieces * hops + small)


def cached(parameters: float, ranks: int, link: float, *, bucket: float) -> Cost:
    """A step between refreshes: the gradient all-reduced in buckets of so many bytes."""
    size = BYTES * parameters
    collectives = math.ceil(size / bucket)
    return Cost(2 * (ranks - 1) / ranks * size / link, collectives * 2 * (ranks - 1) * HOP)


def sharded(parameters: float, ranks: int, link: float) -> Cost:
    """A refresh under FSDP2: K + 1 backward passes, each gathering bf16 weights and scattering float32 gradients."""
    passes, layers = OBJECTIVES + 1, 24
    share = (ranks - 1) / ranks * parameters / link
    return Cost(passes * (2 + BYTES) * share, passes * 2 * layers * (ranks - 1) * HOP)


def lines() -> Iterator[list[str]]:
    """The rows of the table."""
    for name, parameters in (("19 M", 19e6), ("2.2 B", 2.2e9)):
        for ranks in (8, 64, 512):
            for speed, link in LINKS.items():
                due = refresh(parameters, ranks, link)
                whole = refresh(parameters, ranks, link, scatter=False)
                step = cached(parameters, ranks, link, bucket=BYTES * BUCKET)
                reducer = cached(parameters, ranks, link, bucket=DDP_BUCKET)
                seconds = (due.bandwidth, due.latency, due.total, whole.total, step.total, reducer.total)
                shards = f"{1e3 * sharded(parameters, ranks, link).total:,.1f}" if parameters > 1e9 else ""
                yield [name, str(ranks), speed, *(f"{1e3 * value:,.1f}" for value in seconds), shards]


def table() -> Table:
    """Milliseconds."""
    speeds = ["refresh: bandwidth", "latency", "together", "by all-reduce", "step", "DDP", "FSDP2 refresh"]
    columns = ["P", "ranks", "link", *speeds]
    return Table(f"K = {OBJECTIVES} and an extra loss, milliseconds of communication", columns, list(lines()))


if __name__ == "__main__":
    print(table().markdown())
