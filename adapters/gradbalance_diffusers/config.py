"""The configuration of a training run: strict, printable, and with a fingerprint of what a resumed run must share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from gradbalance.errors import InvalidArgumentError

from .schema import Section, join, read_section
from .sections import (
    BalanceConfig,
    EMAConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OldPolicyConfig,
    OptimizerConfig,
    PromptsConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    StageConfig,
    TimestepsConfig,
    require_sources,
)
from .yaml_format import dump_yaml, parse_yaml

__all__ = [
    "PRESETS",
    "BalanceConfig",
    "Config",
    "EMAConfig",
    "EvaluationConfig",
    "LossConfig",
    "ModelConfig",
    "OldPolicyConfig",
    "OptimizerConfig",
    "PromptsConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "StageConfig",
    "TimestepsConfig",
    "load_config",
]

PRESETS = ("tiny", "sd35-medium")

# Keys that leave the trained weights alone, or only say how far to go: a resumed run may change them.
_FREE_ON_RESUME = frozenset(
    {
        "model.device",
        "model.text_encoders",
        "model.cached_prompts",
        "evaluation.every",
        "evaluation.metrics",
        "run.epochs",
        "run.folder",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.report_every",
        "run.threads",
        "run.reward_threads",
        "run.reward_timeout",
        "run.timeout",
        "run.trackers",
    }
)


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Everything that defines a training run.

    Build one with :func:`load_config`, :meth:`from_yaml` or by hand; each way checks types, ranges and the rules
    between sections and raises :class:`gradbalance.InvalidArgumentError` with the dotted path of the field.

    >>> config = load_config("tiny", ["optimizer.lr=1e-3", "prompts.mix.ocr=5"])
    >>> config.optimizer.lr, config.prompts.mix["ocr"]
    (0.001, 5.0)
    >>> Config.from_yaml(config.to_yaml()) == config
    True
    """

    model: ModelConfig
    """The pipeline that is fine-tuned and its LoRA adapters."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How training samples are drawn."""
    prompts: PromptsConfig
    """Training prompts and how an epoch is made of them."""
    rewards: list[RewardConfig]
    """The K rewards, in the order of logs and report."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The DiffusionNFT loss."""
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    """Noise levels trained at."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """How per-reward gradients become one direction."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its learning-rate schedule."""
    old_policy: OldPolicyConfig = field(default_factory=OldPolicyConfig)
    """How the sampling policy follows the trained one."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    """Moving average of the trained weights, used for evaluation."""
    evaluation: EvaluationConfig
    """Scoring on held-out prompts."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, place and bookkeeping of the run."""
    stages: list[StageConfig] = field(default_factory=list)
    """Parts of the run with rewards, prompts or a method of their own; empty is one stage of `run.epochs`."""

    def check(self) -> None:
        """The rules between sections."""
        names = self.reward_names
        if not names or len(set(names)) < len(names):
            found = f"{names}" if names else "no reward"
            raise InvalidArgumentError(f"`rewards` must name at least one reward, each once. Found {found}.")
        metrics = [metric.name for metric in self.evaluation.metrics]
        if len(set(metrics)) < len(metrics):
            raise InvalidArgumentError(f"`evaluation.metrics` must name each metric once. Found {metrics}.")
        self._check_balance(names)
        self._check_timesteps()
        self._check_precision()
        if self.optimizer.steps_per_epoch > self.prompts.groups_per_epoch:
            raise InvalidArgumentError(
                "`optimizer.steps_per_epoch` must not exceed `prompts.groups_per_epoch`: a step needs a prompt group. "
                f"Found {self.optimizer.steps_per_epoch} steps for {self.prompts.groups_per_epoch} groups."
            )
        self._check_stages(names)

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards, in order."""
        return [reward.name for reward in self.rewards]

    @property
    def metrics(self) -> list[RewardConfig]:
        """What a stand-alone evaluation scores."""
        return self.evaluation.metrics or self.rewards

    def to_yaml(self) -> str:
        """The whole configuration, defaults included, as :meth:`from_yaml` reads it."""
        return dump_yaml(asdict(self))

    @classmethod
    def from_yaml(cls, text: str, origin: str = "configuration") -> Config:
        """Read a configuration; ``origin`` names the file in a syntax error."""
        return read_section(cls, parse_yaml(text, origin))

    def frozen_values(self) -> dict[str, Any]:
        """Dotted key to value of everything that a resumed run must share with the run it continues.

        Left out: length, cadence and place of the run, devices, the number of threads, what a failing reward does, and
        the kind of a reward that goes by its name. Values are as JSON gives them back (lists, no tuples), so they
        compare equal after a round trip through a checkpoint.
        """
        plain = json.loads(json.dumps(asdict(self)))
        for reward in plain["rewards"]:
            del reward["on_error"]
            reward["options"].pop("device", None)
            if reward["kind"] in (None, reward["name"]):
                del reward["kind"]  # the same reward either way, also in checkpoints from before kinds were known
        return {key: value for key, value in _flatten(plain).items() if key not in _FREE_ON_RESUME}

    def fingerprint(self) -> str:
        """SHA-256 over :meth:`frozen_values`, as 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.frozen_values(), sort_keys=True).encode()).hexdigest()

    def _check_balance(self, names: list[str]) -> None:
        balance = self.balance
        total = balance.floor * len(names)
        if total > 1.0:
            raise InvalidArgumentError(
                f"`balance.floor` times the number of rewards must be at most 1. "
                f"Found {balance.floor:g} x {len(names)} = {total:g}. Use a floor of at most {1 / len(names):.3g}."
            )
        methods = {balance.method, *(stage.method for stage in self.stages)}
        for option, users in (("reward_weights", ("weighted-sum",)), ("preference", ("marble", "mgda", "mgda-raw"))):
            given = getattr(balance, option)
            if given and not methods & set(users):
                raise InvalidArgumentError(
                    f"`balance.{option}` only has a meaning for `balance.method: {' | '.join(users)}`. Found method "
                    f"{balance.method!r}. Remove it or choose such a method."
                )
            unknown = sorted(set(given) - set(names))
            if unknown:
                raise InvalidArgumentError(f"`balance.{option}` must name rewards of {names}. Found {unknown}.")

    def _check_precision(self) -> None:
        base, mixed = self.model.dtype, self.run.mixed_precision
        allowed = {"float32": ("no", "bf16", "fp16"), "bfloat16": ("no", "bf16"), "float16": ("fp16",)}[base]
        if mixed not in allowed:
            raise InvalidArgumentError(
                f"`run.mixed_precision` must be {' or '.join(allowed)} for `model.dtype: {base}`: a second half format "
                f"only loses digits, and gradients through float16 need the loss scale of fp16. Found {mixed!r}."
            )
        if mixed == "fp16" and self.optimizer.on_nonfinite == "skip":
            raise InvalidArgumentError(
                "`optimizer.on_nonfinite` must be 'raise' with `run.mixed_precision: fp16`, whose loss scale has to "
                "see every overflow. Found 'skip'."
            )

    def _check_timesteps(self) -> None:
        levels = int(self.sampling.steps * self.timesteps.fraction)
        if self.timesteps.mode == "grid" and self.timesteps.per_image > levels:
            raise InvalidArgumentError(
                f"`timesteps.per_image` must not exceed int(sampling.steps * timesteps.fraction) = {levels} in mode "
                f"grid, where levels do not repeat. Found {self.timesteps.per_image}. Lower it or sample in more steps."
            )

    def _check_stages(self, names: list[str]) -> None:
        for number, stage in enumerate(self.stages):
            unknown = sorted(set(stage.rewards or []) - set(names))
            if unknown or stage.rewards == []:
                raise InvalidArgumentError(
                    f"`stages[{number}].rewards` must name one or more rewards of {names} (null: all). "
                    f"Found {unknown or 'an empty list'}."
                )
            if stage.mix is not None:
                require_sources(f"stages[{number}].mix", stage.mix, self.prompts.sources)
        total = sum(stage.epochs for stage in self.stages)
        if self.stages and total != self.run.epochs:
            raise InvalidArgumentError(
                f"`run.epochs` must equal the sum of the stages' epochs, {total}. Found {self.run.epochs}. "
                f"Set run.epochs={total} or change the stages."
            )


def load_config(preset_or_path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A preset or a YAML file, with single values replaced.

    Args:
        preset_or_path: ``"tiny"``, ``"sd35-medium"``, or a path that ends in ``.yaml`` or ``.yml``.
        overrides: ``section.key=value`` each, the value as YAML: ``optimizer.lr=1e-3``, ``rewards=[ocr, geneval]``,
            ``prompts.mix.ocr=4``, ``run.threads=null``.

    Raises:
        InvalidArgumentError: No such preset or file, an override without ``=``, an unknown key or a value out of range.
    """
    path = Path(preset_or_path)
    if str(preset_or_path) in PRESETS:
        text = (resources.files(__package__) / "presets" / f"{preset_or_path}.yaml").read_text("utf-8")
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        text = path.read_text("utf-8")
    else:
        raise InvalidArgumentError(
            f"A configuration must be a preset ({', '.join(PRESETS)}) or an existing .yaml file. "
            f"Found {str(preset_or_path)!r}."
        )
    values = parse_yaml(text, str(preset_or_path))
    for override in overrides:
        _apply(values, override)
    return read_section(Config, values)


def _apply(values: Any, override: str) -> None:
    """Put one ``a.b=value`` into nested plain values; whether the key exists is for the reader to say."""
    key, equals, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not all([*parents, last]):
        raise InvalidArgumentError(
            f"An override must look like section.key=value, such as optimizer.lr=1e-3. Found {override!r}."
        )
    node = values
    for depth, parent in enumerate(parents):
        if isinstance(node, dict) and node.get(parent) is None:
            node[parent] = {}
        node = node[parent] if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise InvalidArgumentError(
                f"The override {override!r} goes inside `{'.'.join(parents[: depth + 1])}`, which is not a mapping. "
                "Replace it as a whole, such as rewards=[ocr, geneval]."
            )
    node[last] = parse_yaml(text, f"override {override!r}")


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys; lists and empty mappings stay whole."""
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _flatten(item, join(path, str(key))).items()}
