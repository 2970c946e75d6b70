"""Several ranks: bytes on the wire and time of a refresh and of an amortized step, against DistributedDataParallel.

Run ``python -m benchmarks ddp``.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradbalance as gb
from benchmarks.report import Result, Table
from benchmarks.wire import bytes_sent
from gradbalance.distributed import Ranks
from gradbalance.distributed.collectives import gather

OBJECTIVES = 5
WIDTHS = (256, 1024, 1024, 1024, 1024, OBJECTIVES)
BATCH = 128
BASELINE = "plain DDP"
ALONE, PASSES = "one backward, nothing sent", "K passes, nothing sent"
ONE_BY_ONE = "K gradients, an all-reduce each"
AMORTIZED = {mode: f'amortized, ranks="{mode}"' for mode in ("ddp", "average")}
ONE, FEW, ALL = "all-reduce of P numbers", "all-reduce of 64 numbers", "the collectives of a refresh"


def run(quick: bool) -> Result:
    """Measure everything."""
    sizes = (2,) if quick else (2, 4)
    widths = (64, 64, OBJECTIVES) if quick else WIDTHS
    rows = [row for size in sizes for row in _measured(size, widths, 2 if quick else 12)]
    parameters = rows[0]["parameters"]
    return Result(
        "ddp",
        {"widths": widths, "batch": BATCH, "K": OBJECTIVES, "ranks": sizes, "parameters": parameters},
        rows,
        [_table([row for row in rows if row["ranks"] == size], size) for size in sizes],
        [
            f"An MLP of {parameters:,} parameters in float32, {BATCH} samples per rank, K = {OBJECTIVES}; gloo over "
            "the loopback device, one thread per rank. A step is zero_grad, forward and backward, up to the averaged "
            "`.grad`; no optimizer.",
            "Sent: what rank 0 sends in one step, from the kernel's counters of its TCP sockets, in units of P numbers "
            "of 4 bytes. Time: the slowest rank's, from a common start; × is the median over rounds of the ratio to "
            "plain DDP in the same round, with quartiles, and CPU that of the CPU time of all ranks. Amortized steps "
            "have five times as many rounds as the others. Ranks beyond the number of cores share them.",
            'gloo has a reduce-scatter in name only: it sends as much as an all-reduce. `reduction="auto"` therefore '
            "all-reduces there, and sends half of that where the backend scatters by itself (NCCL).",
        ],
        {},
    )


def steps(widths: Sequence[int]) -> tuple[dict[str, Callable[[], object]], int]:
    """One step of each kind by name, and the number of parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    wrapped = DistributedDataParallel(model)
    parameters = list(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(BATCH, widths[0])

    def losses(module: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        squares = (module(inputs) - 1).square().mean(0)
        return {f"loss {k}": squares[k] for k in range(OBJECTIVES)}

    def plain(module: nn.Module) -> None:
        torch.stack(list(losses(module).values())).sum().backward()

    def one_by_one() -> None:
        own = losses(model)
        gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in own.values()]
        rows = torch.stack([torch.cat([g.flatten() for g in gradient]) for gradient in gradients])
        for row in rows:
            dist.all_reduce(row)
        rows /= dist.get_world_size()
        combined = gb.MGDA(normalize=True)(gb.gramian(rows)).to(rows) @ rows
        for parameter, part in zip(parameters, combined.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def optimizer(balancer: Any, ranks: Any) -> gb.BalancedOptimizer:
        return gb.BalancedOptimizer(torch.optim.SGD(parameters, lr=0.0), balancer, ranks=ranks)

    def balanced(optimizer: gb.BalancedOptimizer, module: nn.Module, refreshed: bool) -> None:
        optimizer.zero_grad()
        optimizer.backward(losses(module))
        if optimizer.balance().refreshed != refreshed:
            raise RuntimeError(f"meant to measure a step with refreshed = {refreshed}")

    def due(ranks: Any, module: nn.Module) -> Callable[[], object]:
        return partial(balanced, optimizer(gb.MGDA(normalize=True), ranks), module, True)

    def cached(ranks: Any, module: nn.Module) -> Callable[[], object]:
        made = optimizer(gb.MARBLE(interval=10**9), ranks)
        made.backward(losses(module))
        made.step()
        return partial(balanced, made, module, False)

    count = sum(p.numel() for p in parameters)
    rows, vector, few = torch.zeros(OBJECTIVES * count), torch.zeros(count), torch.zeros(64)

    def collectives() -> None:
        for tensor in (few, rows, few[:25]):
            dist.all_reduce(tensor)
        gather(few[:OBJECTIVES], None)
        gather(vector[: count // dist.get_world_size()], None)

    return {
        ONE: lambda: dist.all_reduce(vector),
        FEW: lambda: dist.all_reduce(few),
        ALL: collectives,
        ALONE: partial(plain, model),
        BASELINE: partial(plain, wrapped),
        AMORTIZED["ddp"]: cached("ddp", wrapped),
        AMORTIZED["average"]: cached("average", model),
        PASSES: due("alone", model),
        ONE_BY_ONE: one_by_one,
        'refresh, ranks="ddp"': due("ddp", wrapped),
        'refresh, ranks="average"': due("average", model),
        "refresh, gloo's reduce-scatter": due(Ranks("average", reduction="reduce_scatter"), model),
    }, count


def _measured(size: int, widths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (size, folder, widths, rounds), nprocs=size)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    return rows


def _rank(rank: int, size: int, folder: str, widths: Sequence[int], rounds: int) -> None:
    torch.set_num_threads(1)
    # torch 2.13 warns of the names of collectives that older releases know.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    candidates, parameters = steps(widths)
    sent = {name: _sent(call) for name, call in candidates.items()}
    times: dict[str, list[Tensor]] = {name: [] for name in candidates}
    shuffle = random.Random(0).shuffle
    everything, close = list(candidates), [BASELINE, *AMORTIZED.values()]
    # What differs by little needs more rounds, and they are the quick ones.
    for order in [everything] * rounds + [close] * (4 * rounds):
        shuffle(order)
        for name in order:
            times[name].append(_time(candidates[name]))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        base = torch.stack(times[BASELINE])
        rows = []
        for name, measured in times.items():
            both = torch.stack(measured)
            (low, ratio, high), (_, cpu, _) = np.quantile(
                both / base[: len(both)], [0.25, 0.5, 0.75], axis=0
            ).T.tolist()
            rows.append(
                {"ranks": size, "step": name, "parameters": parameters, "sent": sent[name], "ratio": ratio}
                | {"low": low, "high": high, "cpu": cpu, "rounds": len(both), "seconds": both[:, 0].median().item()}
            )
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def _sent(call: Callable[[], object]) -> int:
    # Once for what only the first call sends. Acknowledgements of the last packets are waited for.
    call()
    dist.barrier()
    time.sleep(0.3)
    before = bytes_sent()
    call()
    time.sleep(0.3)
    return bytes_sent() - before


def _time(call: Callable[[], object]) -> Tensor:
    """[2]: seconds that the slowest rank took, and seconds of CPU time of all ranks together."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    call()
    spent = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(spent[:1], dist.ReduceOp.MAX)
    dist.all_reduce(spent[1:])
    return spent


def _table(rows: Sequence[dict[str, Any]], size: int) -> Table:
    lines = [
        [
            row["step"],
            f"{row['sent'] / (4 * row['parameters']):.2f}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['ratio']:.2f}×",
            f"{row['low']:.2f} – {row['high']:.2f}",
            f"{row['cpu']:.2f}×",
        ]
        for row in rows
    ]
    return Table(f"{size} ranks, K = {OBJECTIVES}", ["step", "sent / P", "ms", "time", "quartiles", "CPU"], lines)
