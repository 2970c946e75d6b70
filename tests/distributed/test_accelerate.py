"""accelerate wraps the model in DDP and its accumulate() in no_sync(): ranks='ddp' as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
import torch
from accelerate import Accelerator
import gradbalance as gb

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
balanced = gb.BalancedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gb.MARBLE(interval=2), ranks="ddp")
model, optimizer = accelerator.prepare(model, balanced)
for step in range(8):
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    with accelerator.accumulate(model):
        y = model(batch.chunk(accelerator.num_processes)[accelerator.process_index])
        balanced.backward({"a": y[:, 0].square().mean() / 2, "b": (y[:, 1] - 1).square().mean() / 2})
        if accelerator.sync_gradients:
            balanced.balance()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps([type(model).__name__, *(v for p in model.parameters() for v in p.flatten().tolist())]))
accelerator.end_training()
"""


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    script = tmp_path / "accelerated.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    printed = []
    for command in ([sys.executable, str(script)], [sys.executable, *launcher, str(script)]):
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        printed += [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    (kind, *alone), *ranks = printed
    assert kind == "Sequential"
    assert [wrapper for wrapper, *_ in ranks] == ["DistributedDataParallel"] * 2
    for _, *parameters in ranks:
        assert parameters == ranks[0][1:]
        assert parameters == pytest.approx(alone, rel=1e-5, abs=1e-6)
