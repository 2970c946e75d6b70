"""The two LoRA adapters of a policy, and which of them the transformer uses now."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbalance.errors import InvalidArgumentError, StateError

Role = Literal["default", "old", "reference"]

ROLES: tuple[Role, ...] = ("default", "old", "reference")
TRAINED, OLD = "default", "old"


class AdapterRoles:
    r"""LoRA adapters ``default`` (trained) and ``old`` (frozen) on one transformer, and the switch between them.

    ============= ========================== ====================
    role          weights                    ``requires_grad``
    ============= ========================== ====================
    ``default``   W + (alpha/rank) B A       always True
    ``old``       W + (alpha/rank) B' A'     always False
    ``reference`` W                          always False
    ============= ========================== ====================

    **Why not diffusers' own switching.** ``set_adapter`` and ``disable_adapters`` freeze every adapter that they
    deactivate, and autograd skips a leaf that is frozen by the time of the backward: a forward in one role, a switch
    and a backward give gradients of ``None`` without a word. Here ``requires_grad`` never changes, so that a graph
    built in the role ``default`` can be differentiated in any role. Under gradient checkpointing the layers run again
    during the backward; each checkpointed block remembers the role of its forward and runs again in that role.

    Args:
        transformer: Model without adapters. It is frozen, and changed in place.
        rank: Rank of every adapter, r >= 1.
        alpha: LoRA alpha; the low-rank product is scaled by alpha / rank.
        target_modules: Endings of the names of the linear layers to adapt.
        init: ``"gaussian"`` (A ~ N(0, 1/rank²)) or ``"kaiming"`` (A as in a linear layer). B starts at zero in both.
        seed: Seed of A; the global random state is left alone.

    Raises:
        InvalidArgumentError: Adapters exist already, an argument is out of range, or no layer matches.
    """

    def __init__(
        self,
        transformer: nn.Module,
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
        init: Literal["gaussian", "kaiming"] = "gaussian",
        seed: int = 0,
    ) -> None:
        present = sorted(getattr(transformer, "peft_config", {}))
        if present:
            raise InvalidArgumentError(
                f"`pipeline.transformer` must carry no adapters. Found {present}. "
                "Merge them first: pipeline.fuse_lora(); pipeline.unload_lora_weights()."
            )
        if rank < 1 or alpha <= 0:
            raise InvalidArgumentError(f"`rank` must be at least 1 and `alpha` positive. Found {rank} and {alpha}.")
        if init not in ("gaussian", "kaiming"):
            raise InvalidArgumentError(f"`init` must be 'gaussian' or 'kaiming'. Found {init!r}.")
        names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
        unmatched = [t for t in target_modules if not any(name == t or name.endswith(f".{t}") for name in names)]
        if unmatched or not target_modules:
            raise InvalidArgumentError(
                f"Every entry of `target_modules` must end the name of a linear layer. No layer matches {unmatched}. "
                f"Layers are named like {names[:3]}."
            )
        transformer.requires_grad_(False)
        config: dict[str, Any] = {
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": sorted(target_modules),
            "init_lora_weights": "gaussian" if init == "gaussian" else True,
        }
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft warns about a second adapter on one model; two adapters are what this class is for.
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute", category=UserWarning)
            torch.default_generator.manual_seed(seed)  # of the CPU only: torch.manual_seed would reseed GPUs as well
            transformer.add_adapter(LoraConfig(**config), TRAINED)
            transformer.add_adapter(LoraConfig(**config), OLD)
        self._layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
        self.parameters = _collect(transformer, TRAINED)
        self.old_parameters = _collect(transformer, OLD)
        for parameter in (*self.parameters.values(), *self.old_parameters.values()):
            # Steps of 3e-4 are below the resolution of half precision, and GradScaler refuses fp16 gradients.
            parameter.data = parameter.data.float()
        self.active: Role = "default"
        self._activate("default")
        self.synchronize()

    @contextlib.contextmanager
    def role(self, name: Role) -> Iterator[None]:
        """Use role ``name`` inside the block; the role before it comes back at the end, also after an error."""
        if name not in ROLES:
            raise InvalidArgumentError(f"A role must be one of {list(ROLES)}. Found {name!r}.")
        before = self.active
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def verify(self) -> None:
        """Raise unless the layers are as this object left them: active adapter, ``requires_grad``, float32.

        Raises:
            StateError: Something else switched, froze or cast the adapters.
        """
        for layer in self._layers:
            found = "reference" if layer.disable_adapters else "+".join(layer.active_adapters)
            if found != self.active:
                raise StateError(
                    f"The transformer must use the role {self.active!r}, but its layers use {found!r}: something "
                    "called set_adapter, disable_adapters or load_lora_weights on it. Use `with policy.role(...)`."
                )
        for parameters, trainable in ((self.parameters, True), (self.old_parameters, False)):
            for name, parameter in parameters.items():
                if parameter.requires_grad is not trainable or parameter.dtype != torch.float32:
                    raise StateError(
                        f"LoRA parameter {name!r} must be float32 with requires_grad={trainable}. Found "
                        f"{parameter.dtype}, requires_grad={parameter.requires_grad}. Something called `.to(dtype)`, "
                        "`set_adapter` or `requires_grad_` on the transformer: use a second pipeline for that."
                    )

    @torch.no_grad()
    def synchronize(self) -> None:
        """Old <- default."""
        for name, parameter in self.old_parameters.items():
            parameter.copy_(self.parameters[name])

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Old <- decay * old + (1 - decay) * default, factor by factor (A and B separately)."""
        if not 0.0 <= decay <= 1.0:
            raise InvalidArgumentError(f"`decay` must be in [0, 1]. Found {decay}.")
        for name, parameter in self.old_parameters.items():
            parameter.lerp_(self.parameters[name], 1.0 - decay)

    def checkpointed(self, block: nn.Module, *inputs: Any) -> Any:
        """Run ``block`` under gradient checkpointing; the second run, in the backward, is in the role of the first."""
        forward_role = self.active

        def run(*args: Any) -> Any:
            with self.role(forward_role):
                return block(*args)

        return checkpoint(run, *inputs, use_reentrant=False)

    def _switch(self, name: Role) -> None:
        if name != self.active:
            self._activate(name)

    def _activate(self, name: Role) -> None:
        for layer in self._layers:
            if name == "reference":
                layer.enable_adapters(False)
            else:
                if layer.disable_adapters:
                    layer.enable_adapters(True)
                layer.set_adapter(name)
        # peft has just frozen what is not active, and unfrozen what is.
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        for parameter in self.old_parameters.values():
            parameter.requires_grad_(False)
        self.active = name


def _collect(transformer: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Parameters of one adapter, sorted by name; the adapter's own name is left out of the keys, as in saved files."""
    marker = f".{adapter}."
    found = {
        name.replace(marker, "."): parameter
        for name, parameter in transformer.named_parameters()
        if marker in name and "lora_" in name
    }
    return dict(sorted(found.items()))


def same_tensors(found: dict[str, Tensor], expected: dict[str, nn.Parameter], what: str) -> None:
    """Raise unless ``found`` has exactly the names and shapes of ``expected``.

    Raises:
        InvalidArgumentError: Names ``what`` and the first name or shape that differs.
    """
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise InvalidArgumentError(
            f"{what} must hold the {len(expected)} LoRA tensors of this policy. Missing: {missing[:2]} ({len(missing)} "
            f"in all); not known: {extra[:2]} ({len(extra)} in all). Use the target modules it was trained with."
        )
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise InvalidArgumentError(
                f"{what} holds {name!r} with shape {tuple(tensor.shape)}; this policy has "
                f"{tuple(expected[name].shape)}. Use the rank it was trained with."
            )
