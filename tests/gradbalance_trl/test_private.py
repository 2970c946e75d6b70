"""What is relied on of TRL: releases, setups, and calls of its loss that leave no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradbalance as gb
from gradbalance_trl import private


@pytest.mark.parametrize(
    ("release", "fits"), [("1.0.0", True), ("1.99.1.dev0", True), ("0.29.1", False), ("2.0", False)]
)
def test_releases(release: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "version", lambda name: release)
    if fits:
        private.check_trl()
        return
    with pytest.raises(gb.MissingDependencyError, match=rf"TRL >= 1.0, < 2, found {release}.*pip install"):
        private.check_trl()


def test_a_missing_method_and_a_missing_trl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_METHODS", ("_calculate_rewards", "_no_such_method"))
    with pytest.raises(gb.MissingDependencyError, match=r"without \['_no_such_method'\]"):
        private.check_trl()

    def absent(name: str) -> str:
        raise private.PackageNotFoundError(name)

    monkeypatch.setattr(private, "version", absent)
    with pytest.raises(gb.MissingDependencyError, match="found none"):
        private.check_trl()


def setup(**changes: Any) -> Any:
    given = {
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
        "use_liger_kernel": False,
        "n_gpu": 1,
        "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": None,
        "compute_liger_loss": None,
    } | changes
    return SimpleNamespace(**given, args=SimpleNamespace(**given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_deepspeed_enabled": True}, "whole parameters on every rank, found DeepSpeed"),
        ({"is_fsdp_enabled": True}, "whole parameters on every rank, found FSDP"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "`gradient_checkpointing_kwargs` must have use_reentrant=False",
        ),
    ],
)
def test_setups_without_rows(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(gb.InvalidArgumentError, match=message):
        private.check_setup(setup(**changes), needs_rows=True)
    private.check_setup(setup(**changes), needs_rows=False)
    private.check_setup(setup(), needs_rows=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"use_liger_kernel": True}, "`use_liger_kernel` must be False"), ({"n_gpu": 2}, "one process per GPU, found 2")],
)
def test_setups_in_which_no_loss_can_be_split(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(gb.InvalidArgumentError, match=message):
        private.check_setup(setup(**changes), needs_rows=False)


@pytest.mark.parametrize(
    ("loss", "delta", "threshold", "off_policy", "linear"),
    [
        ("dapo", None, None, False, True),
        ("dapo", None, None, True, False),
        ("cispo", None, None, True, True),
        ("cispo", None, 0.1, True, False),
        ("grpo", 1.5, None, False, True),
        ("grpo", 0.9, None, False, False),
        ("sapo", None, 0.1, False, False),
    ],
)
def test_where_mixing_advantages_is_exact(
    loss: str, delta: Any, threshold: Any, off_policy: bool, linear: bool
) -> None:
    trainer = SimpleNamespace(loss_type=loss, off_policy_mask_threshold=threshold, args=SimpleNamespace(delta=delta))
    inputs = {"old_per_token_logps": None} if off_policy else {}
    assert private.linear_in_advantages(trainer, inputs) is linear


class FakeTrainer:
    """The parts of TRL's trainer that the loss touches."""

    def __init__(self) -> None:
        self._metrics = {"train": {"entropy": [1.0]}, "eval": {}}
        self.entropy_coef = 0.5
        self.forwards = 0
        self.weight = torch.nn.Parameter(torch.ones(3))

    def _get_per_token_logps_and_entropies(self, scale: float) -> tuple[Any, ...]:
        self.forwards += 1
        return self.weight * scale, None, (self.weight * scale).sum().detach()


def test_one_forward_for_all_calls_of_the_loss() -> None:
    trainer = FakeTrainer()
    with private.shared_forward(trainer) as forward:
        first = trainer._get_per_token_logps_and_entropies(2.0)
        assert trainer._get_per_token_logps_and_entropies(2.0) is first
    assert trainer.forwards == 1
    ((output, leaf),) = forward.differentiable
    assert output.grad_fn is not None
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert torch.equal(output, leaf)
    trainer._get_per_token_logps_and_entropies(1.0)
    assert trainer.forwards == 2
    with pytest.raises(gb.StateError, match="log-probabilities"):
        _ = private.SharedForward().differentiable


def test_a_users_own_forward_is_put_back() -> None:
    trainer = FakeTrainer()
    trainer._get_per_token_logps_and_entropies = own = lambda: (trainer.weight,)
    with pytest.raises(RuntimeError, match="inside"), private.shared_forward(trainer):
        raise RuntimeError("inside")
    assert trainer._get_per_token_logps_and_entropies is own


def test_quiet_calls_change_no_metric_and_no_controller() -> None:
    trainer = FakeTrainer()
    with private.quiet(trainer):
        trainer._metrics["train"]["entropy"].append(5.0)
        trainer._metrics["train"]["new"].append(5.0)
        trainer.entropy_coef = 0.7
    assert trainer._metrics["train"] == {"entropy": [1.0]}
    assert trainer.entropy_coef == 0.5


def test_frozen_embeddings_require_no_grad_whatever_hooks_say() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(3, 2)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

    model = Model().requires_grad_(False)
    model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    index = torch.tensor([0])
    with private.inputs_without_grad(model):
        assert not model.embedding(index).requires_grad
    assert model.embedding(index).requires_grad
    model.embedding.weight.requires_grad_()
    with private.inputs_without_grad(model):
        assert model.embedding(index).grad_fn is not None
