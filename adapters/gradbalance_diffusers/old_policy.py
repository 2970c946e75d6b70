"""How slowly the sampling policy follows the trained one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradbalance.errors import InvalidArgumentError


@dataclass(frozen=True)
class OldPolicySchedule:
    r"""Decay :math:`d(step)` of the update :math:`old \leftarrow d \cdot old + (1 - d) \cdot default`, a pure function.

    ===================== ==================================================
    mode                  d(step)
    ===================== ==================================================
    ``"on_policy"``       0
    ``"linear"``          min(slope · step, cap)
    ``"delayed_linear"``  0 before ``start``, then min(slope · (step - start), cap)
    ``"constant"``        decay
    ===================== ==================================================

    Args:
        mode: One of the four above.
        decay: For ``"constant"``, in [0, 1].
        slope: Growth per optimizer step, not negative.
        cap: Upper bound, in [0, 1].
        start: Optimizer step at which ``"delayed_linear"`` begins.

    Raises:
        InvalidArgumentError: Unknown mode or a number out of its range.

    Source: DiffusionNFT (arXiv 2509.16117), section 3 and its published configurations.

    >>> schedule = OldPolicySchedule.diffusion_nft()
    >>> [schedule(step) for step in (0, 100, 10_000)]
    [0.0, 0.1, 0.5]
    """

    mode: Literal["on_policy", "linear", "delayed_linear", "constant"] = "linear"
    decay: float = 0.0
    slope: float = 0.001
    cap: float = 0.5
    start: int = 0

    def __post_init__(self) -> None:
        modes = ("on_policy", "linear", "delayed_linear", "constant")
        if self.mode not in modes:
            raise InvalidArgumentError(f"`mode` must be one of {list(modes)}. Found {self.mode!r}.")
        for name in ("decay", "cap"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InvalidArgumentError(f"`{name}` must be in [0, 1]. Found {value}.")
        if not self.slope >= 0 or self.start < 0:
            raise InvalidArgumentError(
                f"`slope` and `start` must not be negative. Found {self.slope} and {self.start}."
            )

    def __call__(self, step: int) -> float:
        """The decay after ``step`` optimizer steps."""
        if step < 0:
            raise InvalidArgumentError(f"`step` must not be negative. Found {step}.")
        if self.mode == "constant":
            return self.decay
        if self.mode == "on_policy" or (self.mode == "delayed_linear" and step < self.start):
            return 0.0
        since = step - self.start if self.mode == "delayed_linear" else step
        return min(self.slope * since, self.cap)

    @classmethod
    def diffusion_nft(cls) -> OldPolicySchedule:
        """DiffusionNFT's default: linear, 0.001 per step up to 0.5."""
        return cls("linear", slope=0.001, cap=0.5)

    @classmethod
    def diffusion_nft_ocr(cls) -> OldPolicySchedule:
        """DiffusionNFT for OCR: on-policy for 75 steps, then 0.0075 per step up to 0.999."""
        return cls("delayed_linear", slope=0.0075, cap=0.999, start=75)

    @classmethod
    def marble(cls) -> OldPolicySchedule:
        """MARBLE with five rewards: linear, 0.001 per step up to 0.95."""
        return cls("linear", slope=0.001, cap=0.95)
