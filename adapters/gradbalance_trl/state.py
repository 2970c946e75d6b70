"""The state of the balancing in the Trainer's own checkpoints, and the count of its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class BalanceState(TrainerCallback, ExportableState):
    """Saves a balance as part of ``trainer_state.json`` and tells it when the optimizer has stepped.

    The Trainer may replace it by a copy that it makes itself (``restore_callback_states_from_checkpoint``), so the
    trainer connects it at the start of every run.

    Attributes:
        save: Gives the state to save; None while not connected.
        stepped: Called after every call of the optimizer, with whether the step was skipped (an overflow in half
            precision).
        saved: As loaded by the Trainer.
    """

    def __init__(self) -> None:
        self.save: Callable[[], dict[str, Any]] | None = None
        self.stepped: Callable[[bool], None] | None = None
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer writes to ``trainer_state.json``."""
        return {"args": {}, "attributes": {"saved": self.saved if self.save is None else self.save()}}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer was called."""
        if self.stepped is not None:
            self.stepped(bool(getattr(kwargs.get("optimizer"), "step_was_skipped", False)))

    @classmethod
    def found_in(cls, stateful_callbacks: dict[str, Any]) -> dict[str, Any] | None:
        """The state in ``TrainerState.stateful_callbacks``; None where there is none."""
        entry = stateful_callbacks.get(cls.__name__)
        entry = entry[0] if isinstance(entry, list) else entry
        return None if entry is None else entry["attributes"]["saved"]
