"""A job of one process, and what the block on wrapped models takes for granted. Two ranks: tests/distributed."""

from contextlib import nullcontext  # noqa: F401

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
parts = [torch.randn(4, 8) for _ in range(3)]


def losses(output):
    return {"small": output.square().mean(), "equal": output.diff(dim=1).square().mean()}
