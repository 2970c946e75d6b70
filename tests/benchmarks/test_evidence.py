"""The arithmetic of the experiments: what they say about gradients must be true of gradients."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gradbalance as gb
from benchmarks.evidence import probe
from benchmarks.evidence.__main__ import NAMES, PAGE
from benchmarks.evidence.directions import Step, replay
from benchmarks.evidence.groups import GroupGradients
from benchmarks.evidence.probe import GroupVectors, method_vectors
from benchmarks.evidence.store import Store
from gradbalance_diffusers.advantages import group_advantages
from gradbalance_diffusers.nft import optimality
from gradbalance_diffusers.rewards.table import RewardTable


@pytest.mark.parametrize("module", ["statistics", "store", "directions", "harmony", "comparison", "first_batch"])
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(import_module(f"benchmarks.evidence.{module}")).failed == 0


def test_every_experiment_has_its_place_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert all(f"<!-- begin {name} -->" in page and f"<!-- end {name} -->" in page for name in NAMES)


def test_an_interrupted_measurement_is_made_again_and_a_finished_one_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get("a/b", interrupted)
    assert store.get("a/b", lambda: [1, 2]) == [1, 2]
    assert store.get("a/b", interrupted) == [1, 2]


def test_group_gradients_are_those_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    sums, counts = rng.normal(size=(6, 2, 9)), rng.integers(0, 4, (6, 2)).astype(float)
    flat = sums.reshape(12, 9)
    data = GroupGradients(flat @ flat.T, counts)
    a, b = [0, 2, 5], [1, 3]

    def mean(groups: list[int]) -> Any:
        return sums[groups].sum(0) / np.maximum(counts[groups].sum(0), 1)[:, None]

    np.testing.assert_allclose(data.between(a, b), mean(a) @ mean(b).T, atol=1e-12)


def test_the_unbiased_gramian_has_no_noise_on_its_diagonal() -> None:
    """Rows that are all noise: their own products say |noise|^2, products between groups average to nothing."""
    rng = np.random.default_rng(1)
    sums = rng.normal(size=(200, 1, 50))
    flat = sums.reshape(200, 50)
    data = GroupGradients(flat @ flat.T, np.ones((200, 1)))
    every = range(200)
    assert data.between(every, every)[0, 0] > 0.15
    assert data.unbiased(list(every))[0, 0] < 0.1


@pytest.fixture
def epoch() -> tuple[Any, Any, torch.Tensor]:
    """A configuration and an epoch of 3 prompts x 4 pictures; the second reward applies to one prompt only."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(12, 2, generator=generator, dtype=torch.float64)
    values[4:, 1] = torch.nan
    table = RewardTable(("a", "b"), values, ~values.isnan())
    advantages = group_advantages(values, None, torch.arange(12) // 4)
    config = SimpleNamespace(
        loss=SimpleNamespace(advantage_clip=5.0), prompts=SimpleNamespace(images_per_prompt=4, groups_per_epoch=3)
    )
    data = SimpleNamespace(
        rollout=SimpleNamespace(rewards=table),
        names=["a", "b"],
        advantages=advantages,
        r=optimality(advantages.values, 5.0),
        draws=SimpleNamespace(sigma=torch.rand(12, 2, generator=generator)),
    )
    return config, data, torch.arange(12)


@pytest.mark.parametrize(("kind", "center"), [("full", False), ("centered", True)])
def test_vectors_are_the_objectives_of_the_trainer(epoch: Any, kind: str, center: bool) -> None:
    config, data, samples = epoch
    labels, coefficients = method_vectors(config, data, samples, 1)
    positive, negative = torch.rand(2, 12, dtype=torch.float64)
    loss = gb.AffineLoss.interpolate(
        positive, negative, data.r, data.advantages.mask, counts=data.advantages.mask.sum(0) * 2, batch_size=24,
        center=center, names=data.names,
    )  # fmt: skip
    values = (coefficients * torch.stack([positive, negative])).sum((1, 2))
    found = values[[labels.index(f"{kind}:{name}") for name in data.names]]
    torch.testing.assert_close(found, loss.objectives().double(), rtol=1e-5, atol=1e-7)


def test_vectors_of_groups_add_up_to_the_centered_rows(epoch: Any) -> None:
    config, data, samples = epoch
    vectors = GroupVectors()
    labels, coefficients = vectors(config, data, samples, 0)
    every, rows = method_vectors(config, data, samples, 0)
    counts = np.sum(vectors.counts, axis=0)
    for k, name in enumerate(data.names):
        own = [j for j, label in enumerate(labels) if label.endswith(f":{name}")]
        together = coefficients[own].sum(0) / counts[k]
        torch.testing.assert_close(together, rows[every.index(f"centered:{name}")], rtol=1e-6, atol=1e-9)


def test_a_replayed_balancer_is_asked_when_a_refresh_is_due() -> None:
    rng = np.random.default_rng(2)
    steps = []
    for _ in range(4):
        rows = rng.normal(size=(2, 5))
        steps.append(Step({"labels": ["full:a", "full:b"], "gram": rows @ rows.T}, ["a", "b"]))
    directions = replay(steps, "full", gb.MARBLE(interval=2, ema_decay=0.0))
    assert [fresh for _, fresh in directions] == [True, False, True, False]
    np.testing.assert_array_equal(directions[1][0], directions[0][0])
    np.testing.assert_allclose(directions[2][0], steps[2].balanced("full", gb.MARBLE(interval=1)))


def test_a_probed_run_keeps_what_the_steps_were_made_of() -> None:
    probed = probe._probe(("balance.interval=1",), 0, quick=True)
    records = [Step(record, probed["names"]) for record in probed["records"]]
    assert [(record["epoch"], record["position"]) for record in probed["records"]] == [(0, 0), (1, 0)]
    for step in records:
        assert np.linalg.eigvalsh(step.gram).min() > -1e-6 * step.gram.diagonal().max()
        # An objective is what knows its reward and what all rewards share (contrast is defined for every picture).
        rest = step.single("full:contrast") - step.single("centered:contrast") - step.single("common")
        assert rest @ step.gram @ rest < 1e-6 * step.gram.diagonal().max()
        assert step.rows("centered").diagonal().min() > 0


def test_groups_of_prompts_have_gradients() -> None:
    found = probe._group_gradients((), 0, quick=True)
    data = GroupGradients(np.array(found["gram"]), np.array(found["counts"]))
    assert (data.groups, data.rewards) == (16, 5)
    assert np.linalg.eigvalsh(data.between(range(16), range(16))).min() > 0
