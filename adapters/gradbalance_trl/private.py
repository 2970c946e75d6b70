"""Everything of TRL that this adapter relies on without TRL promising it: the one file to look at for a new release.

Tested with TRL 1.0.0 and 1.16.0. Overridden in ``balanced_grpo_trainer``: ``_calculate_rewards`` and
``_generate_and_score_completions`` of ``GRPOTrainer``. Used here: ``_get_per_token_logps_and_entropies``, ``_metrics``
and the state of the entropy controller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradbalance.errors import InvalidArgumentError, MissingDependencyError, StateError

if TYPE_CHECKING:
    from trl import GRPOTrainer

OLDEST, BEFORE = (1, 0), (2, 0)
_METHODS = ("_calculate_rewards", "_generate_and_score_completions", "_get_per_token_logps_and_entropies")
_FORWARD = "_get_per_token_logps_and_entropies"
# What a call of the loss may change besides the metrics (TRL with adaptive entropy).
_ENTROPY_CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")


def check_trl() -> None:
    """Raise where TRL is missing, or of a release that the private names were not checked against.

    Raises:
        MissingDependencyError: No TRL, one before 1.0 or after 1.x, or one whose ``GRPOTrainer`` lacks a method.
    """
    wanted = f"gradbalance_trl needs TRL >= {OLDEST[0]}.{OLDEST[1]}, < {BEFORE[0]}"
    remedy = "Run: pip install 'gradbalance[trl]'"
    try:
        found = version("trl")
    except PackageNotFoundError as error:
        raise MissingDependencyError(f"{wanted}, found none. {remedy}") from error
    if not OLDEST <= _major_minor(found) < BEFORE:
        raise MissingDependencyError(
            f"{wanted}, found {found}: other releases name their internals differently. {remedy}"
        )
    from trl import GRPOTrainer

    missing = [name for name in _METHODS if not callable(getattr(GRPOTrainer, name, None))]
    if missing:
        raise MissingDependencyError(
            f"{wanted} whose GRPOTrainer has the methods {list(_METHODS)}, found {found} without {missing}. {remedy} "
            "with an older TRL."
        )


def _major_minor(release: str) -> tuple[int, int]:
    """The first two numbers of a release.

    >>> _major_minor("1.16.0.dev0")
    (1, 16)
    """
    major, minor = [*release.split("."), "0"][:2]
    return int(major), int(minor)


def check_setup(trainer: GRPOTrainer, *, needs_rows: bool) -> None:
    """Raise where per-reward gradients of this trainer cannot be had, or not rightly.

    Args:
        trainer: After its ``__init__``.
        needs_rows: Will the balancer ever ask for per-reward gradients?

    Raises:
        InvalidArgumentError: Reentrant checkpointing, a fused loss, DataParallel, or an engine that shards parameters.
    """
    args = trainer.args
    if getattr(args, "use_liger_kernel", False) and hasattr(trainer, "compute_liger_loss"):
        raise InvalidArgumentError(
            "`use_liger_kernel` must be False, found True: the fused loss of this TRL hides the log-probabilities that "
            "per-reward losses are made of. Leave it out."
        )
    if args.n_gpu > 1:
        raise InvalidArgumentError(
            f"the script must be started with one process per GPU, found {args.n_gpu} GPUs in one process "
            "(DataParallel). Use `accelerate launch` or `torchrun`."
        )
    if not needs_rows:
        return
    # transformers 5 renames gradient_checkpointing to activation_checkpointing; until version 6 both say the same.
    kind = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    kwargs = getattr(args, f"{kind}_checkpointing_kwargs") or {}
    if getattr(args, f"{kind}_checkpointing") and kwargs.get("use_reentrant"):
        raise InvalidArgumentError(
            f"`{kind}_checkpointing_kwargs` must have use_reentrant=False, found True: reentrant checkpointing hides "
            "its parameters from per-reward gradients. Leave it out."
        )
    for enabled, engine in ((trainer.is_deepspeed_enabled, "DeepSpeed"), (trainer.is_fsdp_enabled, "FSDP")):
        if enabled:
            raise InvalidArgumentError(
                f"per-reward gradients need whole parameters on every rank, found {engine}: gradients that its own "
                "backward pass does not see are neither gathered nor averaged. Use plain data parallelism (LoRA makes "
                "the gradients small), or a balancer without them: balancer=gradbalance.Fixed(weights)."
            )


def linear_in_advantages(trainer: GRPOTrainer, inputs: Mapping[str, Any]) -> bool:
    """Is the gradient of TRL's loss on this batch linear in the advantages, whatever their signs?

    On-policy every ratio is 1 and no clipping or temperature that depends on the sign of an advantage takes part; TRL
    shows it by leaving out ``old_per_token_logps``. Exceptions on-policy: ``delta`` < 1 cuts even ratios of 1, and
    ``off_policy_mask_threshold`` drops samples by sign. CISPO is linear off-policy too.
    """
    if trainer.off_policy_mask_threshold is not None:
        return False
    if trainer.loss_type == "cispo":
        return True
    delta = trainer.args.delta
    return "old_per_token_logps" not in inputs and (delta is None or delta >= 1)


class SharedForward:
    """One forward of the policy for any number of calls of the loss.

    Attributes:
        outputs: What the forward gave, on the graph: log-probabilities [B, T], entropies [B, T] or None, and what later
            releases add.
        leaves: The same as fresh leaves, which is what the loss gets: differentiating it costs nothing of the model.
    """

    def __init__(self) -> None:
        self.outputs: tuple[Tensor | None, ...] = ()
        self.leaves: tuple[Tensor | None, ...] = ()

    @property
    def differentiable(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of output and leaf that carry gradient, the log-probabilities first."""
        pairs = [
            (output, leaf)
            for output, leaf in zip(self.outputs, self.leaves, strict=True)
            if output is not None and leaf is not None and leaf.requires_grad
        ]
        if not pairs:
            raise StateError(
                "the loss of TRL did not ask for log-probabilities that require grad: nothing is trainable, or a "
                f"subclass does not call {_FORWARD}."
            )
        return pairs

    def take(self, outputs: tuple[Tensor | None, ...]) -> None:
        """Keep the outputs and make the leaves."""
        self.outputs = outputs
        self.leaves = tuple(
            output.detach().requires_grad_() if isinstance(output, Tensor) and output.requires_grad else output
            for output in outputs
        )


@contextmanager
def shared_forward(trainer: GRPOTrainer) -> Iterator[SharedForward]:
    """Inside, the first call of the loss runs the model, and the others get its outputs again."""
    forward = SharedForward()
    run = getattr(trainer, _FORWARD)
    patched = trainer.__dict__.get(_FORWARD)

    def shared(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        if not forward.outputs:
            forward.take(tuple(run(*args, **kwargs)))
        return forward.leaves

    trainer.__dict__[_FORWARD] = shared
    try:
        yield forward
    finally:
        if patched is None:
            del trainer.__dict__[_FORWARD]
        else:
            trainer.__dict__[_FORWARD] = patched


@contextmanager
def quiet(trainer: GRPOTrainer) -> Iterator[None]:
    """Inside, calls of the loss leave no trace in the metrics or in the entropy controller."""
    metrics, trainer._metrics = trainer._metrics, {"train": defaultdict(list), "eval": defaultdict(list)}
    controller = {name: trainer.__dict__[name] for name in _ENTROPY_CONTROLLER if name in trainer.__dict__}
    try:
        yield
    finally:
        trainer._metrics = metrics
        trainer.__dict__.update(controller)


def log_metrics(trainer: GRPOTrainer, values: Mapping[str, float]) -> None:
    """Add numbers to TRL's own metrics of training, which it averages over ``logging_steps``."""
    for name, value in values.items():
        trainer._metrics["train"][name].append(value)


@contextmanager
def inputs_without_grad(model: nn.Module) -> Iterator[None]:
    """Inside, the output of a frozen input embedding requires no grad, whatever hooks say.

    transformers makes it require grad for the sake of reentrant checkpointing. It is then a leaf that no optimizer
    holds, and the plain gradient that the core gives to such leaves would cost a whole backward pass.
    """
    embedding = model.get_input_embeddings()
    if any(parameter.requires_grad for parameter in embedding.parameters()):
        yield
        return
    handle = embedding.register_forward_hook(lambda module, args, output: output.detach())
    try:
        yield
    finally:
        handle.remove()
