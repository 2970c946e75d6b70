"""Rows of an AffineLoss by the collector under test and by K passes, and their comparison."""

from __future__ import annotations

from torch import nn

from gradbalance.affine import AffineLoss
from gradbalance.gradients.graph import explore
from gradbalance.gradients.linear import collect_linear
from gradbalance.gradients.losses import as_objectives
from gradbalance.gradients.passes import collect_by_passes
from gradbalance.gradients.record import resumed
from gradbalance.gradients.rows import Rows


def linear_rows(loss: AffineLoss, parameters: list[nn.Parameter]) -> Rows:
    rows = Rows(parameters, len(loss))
    collect_linear(loss, rows, explore([loss.terms]))
    return rows


def reference_rows(loss: AffineLoss, parameters: list[nn.Parameter]) -> Rows:
    rows = Rows(parameters, len(loss))
    with resumed(explore([loss.terms]).recordings):
        collect_by_passes(as_objectives(loss), rows)
    return rows


def assert_same(found: Rows, expected: Rows, tolerance: float) -> None:
    for a, b in zip(found.blocks, expected.blocks, strict=True):
        assert b.norm() > 0
        assert ((a - b).norm(dim=1) <= tolerance * b.norm(dim=1)).all()
