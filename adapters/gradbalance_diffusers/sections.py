"""The sections of a training configuration. Every field has its unit and, where there is one, its source below it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from gradbalance.errors import InvalidArgumentError

from .schema import Count, Decay, Fraction, Natural, NonNegative, Positive, Range, Section

Source = Literal["general", "ocr", "geneval"]
Method = Literal["marble", "mgda", "mgda-raw", "nash", "mean", "weighted-sum"]
Solver = Literal["dpm++2m", "euler"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The pipeline that is fine-tuned and its LoRA adapters."""

    section: ClassVar[str] = "model"

    path: str
    """Hub id, local folder of a diffusers SD3 pipeline, or `tiny` for the model shipped with this package."""
    revision: str | None = None
    """Git revision on the hub; null takes the default branch."""
    variant: str | None = None
    """File variant on the hub, such as `fp16`; null takes the plain files."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the frozen base. LoRA weights are always float32."""
    load_t5: bool = True
    """Load the third text encoder (T5, 9 GB for SD3.5); false replaces its tokens by zeros."""
    max_sequence_length: Natural = 128
    """T5 tokens of a prompt (DiffusionNFT: 128). 0 drops them, the right value without T5."""
    text_encoders: Literal["keep", "offload", "drop"] = "keep"
    """Where text encoders wait: on the device; on the CPU, coming to the device for the new prompts of an epoch; or
    nowhere, after every prompt of the run was encoded at its start (few prompts only: 1.7 MB each with T5)."""
    cached_prompts: Count | None = 2048
    """Most prompt embeddings kept in host memory; null keeps all, as `text_encoders: drop` always does."""
    height: Count = 512
    """Height of a picture in pixels."""
    width: Count = 512
    """Width of a picture in pixels."""
    lora_rank: Count = 32
    """Rank of the LoRA factors (DiffusionNFT: 32)."""
    lora_alpha: Positive = 64.0
    """LoRA scale; the update is multiplied by lora_alpha / lora_rank (DiffusionNFT: 64)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    device: str = "auto"
    """Torch device; `auto` takes CUDA where there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """How training samples are drawn from the old policy."""

    section: ClassVar[str] = "sampling"

    steps: Count = 25
    """Solver steps per picture (MARBLE: 25)."""
    solver: Solver = "dpm++2m"
    """ODE solver: second-order DPM-Solver++ in data prediction, or Euler."""
    guidance_scale: NonNegative = 1.0
    """Classifier-free guidance; 1 is none, as both papers train."""
    batch_size: Count = 9
    """Pictures per forward pass of the sampler. Changes memory and speed, not which pictures come out."""
    decode_batch_size: Count = 4
    """Pictures per forward pass of the VAE decoder, whose activations are the largest of all (1 GB each at 512 px)."""


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(Section):
    """Training prompts and how an epoch is made of them."""

    section: ClassVar[str] = "prompts"

    sources: dict[Source, str]
    """Per source a .txt (one prompt a line) or .jsonl file, `packaged` for 30 examples that come with this package, or
    `tiny` for the prompts of the tiny model. Texts that `evaluation.sources` has are left out."""
    mix: dict[Source, Positive]
    """Share of each source in an epoch; any positive numbers, only their ratio counts."""
    groups_per_epoch: Count = 48
    """Prompts per epoch (MARBLE: 48)."""
    images_per_prompt: Count = 24
    """Pictures per prompt, the group that advantages are taken over (MARBLE: 24)."""

    def check(self) -> None:
        """Every source in the mix has prompts, and groups are large enough for an advantage."""
        require_sources("prompts.mix", self.mix, self.sources)
        if self.images_per_prompt < 2:
            raise InvalidArgumentError(
                "`prompts.images_per_prompt` must be at least 2: an advantage compares pictures of one prompt. Found 1."
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """One reward. In YAML a bare name stands for `{name: ...}`."""

    section: ClassVar[str] = "rewards"
    shorthand: ClassVar[str | None] = "name"

    name: str
    """Name of the objective in logs, stages and weights."""
    kind: str | None = None
    """What scores it: a reward shipped with this package, or `package.module:attribute` of your own. null: the name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor, such as `device: cuda:1` for those with a model."""
    on_error: Literal["raise", "mask"] = "raise"
    """What a failure or a timeout does: stop the run, or leave out and count the scores of the batch."""

    @property
    def scorer(self) -> str:
        """The kind, or else the name: what :func:`gradbalance_diffusers.rewards.make_reward` is asked for."""
        return self.name if self.kind is None else self.kind


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """The DiffusionNFT loss (arXiv 2509.16117) per reward."""

    section: ClassVar[str] = "loss"

    guidance_beta: Positive = 0.1
    """Size of the implicit step: v+- = v_old +- beta (v - v_old). MARBLE: 0.1."""
    kl_weight: NonNegative = 1e-4
    """Weight of mean (v - v_ref)^2, added outside the balancing. MARBLE: 1e-4."""
    advantage_clip: Positive = 5.0
    """A_max in r = clamp(1/2 + A / (2 A_max), 0, 1), in standard deviations. DiffusionNFT: 5."""
    advantage_std: Literal["global", "group"] = "global"
    """Standard deviation that advantages are divided by: of a reward's whole epoch, or of the prompt's group."""
    advantage_epsilon: NonNegative = 1e-4
    """Added to that standard deviation, in units of the reward (DiffusionNFT: 1e-4). 0 makes advantages independent of
    the unit of a reward, exactly."""
    missing: Literal["mask", "zero"] = "mask"
    """A reward that does not apply to a sample: leave the sample out of its mean (`mask`), or count it with advantage 0
    (`zero`), as the published MARBLE code does on most steps: specialists weigh less and pull to the old policy."""
    center: bool = False
    """Balance only (r - 1/2)(L+ - L-) and add the part that all rewards share outside."""


@dataclass(frozen=True, kw_only=True)
class TimestepsConfig(Section):
    """Noise levels s in (0, 1] that a sample is trained at; 1 is pure noise."""

    section: ClassVar[str] = "timesteps"

    mode: Literal["grid", "continuous"] = "grid"
    """`grid`: levels of the sampler's own steps, without repeats; `continuous`: any level, with the grid's density."""
    per_image: Count = 24
    """Noise levels per picture and epoch (MARBLE: 24 of 25)."""
    fraction: Annotated[float, Range(above=0.0, at_most=1.0)] = 0.99
    """Grid only: share of the sampler's steps to choose from, int(fraction * steps) levels (DiffusionNFT: 0.99)."""
    low: Fraction = 0.0
    """Lowest noise level."""
    high: Fraction = 1.0
    """Highest noise level."""
    share_in_group: bool = False
    """Give all pictures of a prompt the same (level, noise): unbiased, and less noise between their advantages."""

    def check(self) -> None:
        """The range is not empty."""
        if not self.low < self.high:
            raise InvalidArgumentError(
                f"`timesteps.low` must be below `timesteps.high`. Found low={self.low:g}, high={self.high:g}."
            )


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(Section):
    """How per-reward gradients become one direction (MARBLE, arXiv 2605.06507)."""

    section: ClassVar[str] = "balance"

    method: Method = "marble"
    """`marble`, `mgda` (solved afresh every step), `nash`, `mean` (1/K) or `weighted-sum` (one scalar reward)."""
    interval: Count = 10
    """Optimizer steps between full solves (marble, nash). MARBLE: 10."""
    ema_decay: Decay = 0.7
    """rho of the moving average of the coefficients (marble). MARBLE: 0.7."""
    amortize: Literal["direction", "coefficients"] = "direction"
    """What is cached between solves (marble): the solved direction's own weights, or the bare coefficients."""
    floor: Decay = 0.0
    """Least coefficient of a reward (marble, mgda); floor times the number of rewards is at most 1."""
    shrinkage: Decay = 0.0
    """Share by which coefficients are drawn to equal ones (marble); where rewards truly conflict 0.25 to 0.5 helps."""
    uniform_after: Count | None = None
    """Optimizer step from which coefficients are uniform (marble); null never."""
    collector: Literal["auto", "passes", "linear"] = "auto"
    """How rows are collected: one backward per reward (`passes`), or from recorded linear layers (`linear`)."""
    measure_conflicts: bool = False
    """Estimate from the rows of all refreshes which rewards conflict, for the report. Takes 32 bytes of host memory and
    of each checkpoint per reward and LoRA parameter: with 5 rewards 30 MB for `tiny`, 3 GB for SD3.5 Medium."""
    preference: dict[str, Positive] = field(default_factory=dict)
    """Priority per reward name (marble, mgda): relative gains go with the priorities; a name left out has 1."""
    reward_weights: dict[str, NonNegative] = field(default_factory=dict)
    """Weight per reward name in the scalar reward (weighted-sum only); a name left out has weight 1."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    section: ClassVar[str] = "optimizer"

    lr: Positive = 3e-4
    """Learning rate after the warm-up (DiffusionNFT: 3e-4)."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's first and second moment."""
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay (DiffusionNFT: 1e-4)."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Positive | None = 1.0
    """The balanced gradient is clipped to this norm; null does not clip. DiffusionNFT: 1."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a cosine that ends with the run."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    final_lr_ratio: Fraction = 0.1
    """Cosine only: last learning rate divided by `lr`."""
    steps_per_epoch: Count = 1
    """Optimizer steps per epoch; prompt groups are dealt out between them."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """NaN or Inf in a loss or gradient: stop the run, or skip the step and log whose it was. fp16: only `raise`."""
    micro_batch_size: Count | None = None
    """Samples per forward and backward pass; null takes a whole optimizer step at once. Only memory changes."""


@dataclass(frozen=True, kw_only=True)
class OldPolicyConfig(Section):
    """How the sampling policy follows the trained one: old <- d old + (1 - d) trained, after every epoch.

    d is a pure function of the optimizer step k.
    """

    section: ClassVar[str] = "old_policy"

    mode: Literal["on_policy", "linear", "delayed_linear", "constant"] = "linear"
    """`on_policy`: d = 0; `linear`: min(slope k, cap); `delayed_linear`: the same in k - start; `constant`: decay."""
    decay: Fraction = 0.0
    """d of mode `constant`."""
    slope: NonNegative = 0.001
    """Growth of d per optimizer step (linear modes). DiffusionNFT: 0.001."""
    cap: Fraction = 0.95
    """Largest d (linear modes). MARBLE: 0.95, DiffusionNFT: 0.5."""
    start: Natural = 0
    """Optimizer step at which d begins to grow (delayed_linear)."""


@dataclass(frozen=True, kw_only=True)
class EMAConfig(Section):
    """Moving average of the trained weights, used for evaluation."""

    section: ClassVar[str] = "ema"

    decay: Decay = 0.9
    """Decay per optimizer step (MARBLE: 0.9)."""
    warmup: bool = True
    """Use min(decay, (1 + k) / (10 + k)) at step k, so that early averages forget the start quickly."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Scoring on held-out prompts with fixed seeds: picture i always has seed + i."""

    section: ClassVar[str] = "evaluation"

    every: Count = 10
    """Epochs between evaluations; the first is before training, the last after it."""
    sources: dict[Source, str]
    """Held-out prompts per source, given as in `prompts.sources`."""
    prompts_per_source: Count = 64
    """At most this many prompts of each source, the first ones of the file."""
    steps: Count = 40
    """Solver steps per picture (DiffusionNFT: 40)."""
    solver: Solver = "euler"
    """ODE solver (DiffusionNFT evaluates with Euler)."""
    seed: Natural = 1_000_000
    """Seed of the first picture's noise."""
    metrics: list[RewardConfig] = field(default_factory=list)
    """What examples/evaluate_sd35.py scores, given as `rewards` are; empty takes the training rewards."""
    saved_images: Natural = 8
    """Pictures of each source that every evaluation keeps, for the before/after grid of the report."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Length, place and bookkeeping of a run."""

    section: ClassVar[str] = "run"

    seed: Natural = 0
    """All randomness of training is a pure function of (seed, epoch)."""
    epochs: Count = 300
    """Epochs to train. May grow on resume; a cosine schedule then ends later, so its learning rate steps up."""
    folder: str = "runs/default"
    """Where metrics, checkpoints, pictures and the report go."""
    checkpoint_every: Count = 10
    """Epochs between checkpoints; the last epoch always has one."""
    keep_checkpoints: Count = 3
    """Newest checkpoints kept."""
    report_every: Count = 10
    """Epochs between rewrites of report.html."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast of forward passes in training and sampling. `fp16` comes with a loss scale; a step whose gradients
    overflow is repeated with a lower one. DiffusionNFT: fp16 on a float32 base."""
    tf32: bool = True
    """On CUDA, multiply float32 matrices in TF32 (10 bits of mantissa): several times faster."""
    threads: Count | None = None
    """CPU threads of torch; null leaves torch's choice."""
    reward_threads: Count = 1
    """Threads that score beside the sampling; reward k runs in thread k mod this."""
    reward_timeout: Positive | None = None
    """Longest wait in seconds for one reward on one batch; null waits for ever."""
    timeout: Positive = 1800.0
    """Longest time in seconds that one process waits for the others of a distributed run. They are apart by what rank 0
    writes alone (checkpoints, pictures, report) and by how long each one's rewards take."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Where metrics go beside metrics.jsonl, under the same names."""


@dataclass(frozen=True, kw_only=True)
class StageConfig(Section):
    """A part of the run with its own rewards, prompts or method."""

    section: ClassVar[str] = "stages"

    name: str
    """Label in logs and report."""
    epochs: Count
    """Epochs of this stage."""
    rewards: list[str] | None = None
    """Names of the rewards trained on; null all. All rewards are scored and logged in any case."""
    mix: dict[Source, Positive] | None = None
    """Prompt mix; null as in `prompts.mix`."""
    method: Method | None = None
    """Balancing method; null as in `balance.method`."""


def require_sources(path: str, mix: dict[Source, float], sources: dict[Source, str]) -> None:
    """A mix is not empty and draws only on sources that have prompts."""
    missing = sorted(set(mix) - set(sources))
    if missing or not mix:
        found = f"{missing} without prompts" if missing else "an empty mix"
        raise InvalidArgumentError(
            f"`{path}` must name sources that `prompts.sources` has ({', '.join(sources) or 'none'}). Found {found}. "
            "Add the prompt files or correct the mix."
        )
