"""Command line of an evaluation: which models, on which prompts, scored by what."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from gradbalance.errors import GradBalanceError, InvalidArgumentError

from ..config import PRESETS, Config, load_config
from ..rewards import check_reward_name
from ..sections import RewardConfig, Solver
from ..session import first_rank_prints
from .folder import EvaluationFolder
from .generate import Sampling
from .specs import ModelSpec, parse_specs

Step = Literal["generate", "score", "report"]
STEPS: tuple[Step, ...] = ("generate", "score", "report")


@dataclass(frozen=True)
class Arguments:
    """What the command line asked for.

    Attributes:
        output: Folder of the evaluation.
        steps: The steps to do, in order.
        models: Models as typed; only their names count without the step ``generate``.
        config: Model, prompts and the rest, as the preset, the file or the run has it and the options changed it.
        guidance: Classifier-free guidance of models that name none.
        samples: Pictures per prompt.
        metrics: What is scored; with the step ``score`` alone, what the folder was made for, unless said.
    """

    output: Path
    steps: tuple[Step, ...]
    models: list[str]
    config: Config
    guidance: float
    samples: int
    metrics: list[RewardConfig]

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        if "generate" in self.steps:
            return [spec.name for spec in self.specs()]
        return [text.partition("=")[0] for text in self.models]

    def specs(self) -> list[ModelSpec]:
        """The models, looked up."""
        return parse_specs(self.models)

    def sampling(self) -> Sampling:
        """How pictures are made."""
        return replace(Sampling.from_config(self.config), guidance_scale=self.guidance)


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Read a command line; prints a message and ends the program on ``--help`` or a mistake.

    Model, prompts and solver are those of ``--preset`` or ``--config``; without one, those of the first run that is
    evaluated, so that pictures are what training's own evaluation makes; without a run, those of the preset ``tiny``.

    Args:
        arguments: Words of the command line; None takes those of the program.

    >>> arguments = parse_arguments(["--preset", "tiny", "base", "cfg=base@4.5", "--steps", "4", "--metrics", "ocr"])
    >>> arguments.names, arguments.sampling().steps, [metric.name for metric in arguments.metrics]
    (['base', 'cfg'], 4, ['ocr'])
    """
    with first_rank_prints():
        parser = _parser()
        given = parser.parse_intermixed_args(arguments)
        try:
            return _arguments(given)
        except GradBalanceError as error:
            parser.error(str(error))


def _arguments(given: argparse.Namespace) -> Arguments:
    steps = STEPS if given.only is None else (given.only,)
    if "generate" in steps and not given.models:
        raise InvalidArgumentError(
            "Name at least one model to generate pictures of: base, NAME=RUN_FOLDER, ... Found none."
        )
    specs = parse_specs(given.models) if "generate" in steps else []
    config = load_config(_origin(given, specs), _overrides(given))
    if given.guidance < 1:
        raise InvalidArgumentError(f"--guidance must be at least 1, which is none. Found {given.guidance:g}.")
    if given.samples < 1:
        raise InvalidArgumentError(f"--samples must be at least 1. Found {given.samples}.")
    return Arguments(
        output=Path(given.output),
        steps=steps,
        models=given.models,
        config=config,
        guidance=given.guidance,
        samples=given.samples,
        metrics=_metrics(given, config),
    )


def _origin(given: argparse.Namespace, specs: Sequence[ModelSpec]) -> str:
    """The preset or file to begin with; what is chosen without being asked for is printed."""
    if given.config or given.preset:
        return str(given.config or given.preset)
    saved = [run / "config.yaml" for spec in specs if (run := spec.run) is not None]
    if saved:
        print(f"Model, prompts and solver: as in {saved[0]}")
        return str(saved[0])
    if given.only not in ("score", "report"):
        print(
            "No run and no --preset given: evaluating the packaged tiny SD3. --preset sd35-medium takes SD3.5 Medium."
        )
    return "tiny"


def _overrides(given: argparse.Namespace) -> list[str]:
    """Options that stand for one key each. They come after --set, so they win."""
    keys = {
        "model.path": given.model,
        "model.dtype": given.dtype,
        "model.device": given.device,
        "evaluation.steps": given.steps,
        "evaluation.solver": given.solver,
        "evaluation.sources": _sources(given.prompts),
        "evaluation.prompts_per_source": _limit(given.prompts_per_source),
        "sampling.batch_size": given.batch_size,
    }
    return [*given.set, *(f"{key}={json.dumps(value)}" for key, value in keys.items() if value is not None)]


def _sources(given: Sequence[str]) -> dict[str, str] | None:
    sources = dict(text.partition("=")[::2] for text in given)
    if not all(sources.values()):
        raise InvalidArgumentError(f"--prompts must look like ocr=data/ocr/test.txt. Found {list(given)}.")
    return sources or None


def _limit(text: str | None) -> int | None:
    if text is None or text == "all":
        return None if text is None else sys.maxsize
    if not text.isdigit():
        raise InvalidArgumentError(f"--prompts-per-source must be a whole number or 'all'. Found {text!r}.")
    return int(text)


def _metrics(given: argparse.Namespace, config: Config) -> list[RewardConfig]:
    """The metrics named, with their options where the folder or the configuration has some; without names, all of it.

    A folder that is scored on another machine says itself what it was made for.
    """
    registered = EvaluationFolder(given.output).metrics()
    of_folder = [RewardConfig(name=name, **record) for name, record in registered.items()]
    configured = given.preset or given.config or given.only in (None, "generate")
    chosen = config.metrics if configured else of_folder
    if given.metrics is not None:
        known = {metric.name: metric for metric in [*config.rewards, *of_folder, *chosen]}
        named = [known.get(name, RewardConfig(name=name)) for name in given.metrics.split(",")]
        for metric in named:
            check_reward_name(metric.scorer)  # a folder would keep a misspelt one, and ask for it for ever
        return named
    if given.only == "score" and not chosen:
        raise InvalidArgumentError(
            f"Say what to score, with --metrics or --preset: {given.output} does not know. Found neither."
        )
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare a base model, runs, checkpoints and LoRAs on the same prompts and noise: generate "
        "pictures, score them, report. The same command goes on where it was stopped.",
        epilog="models:\n"
        "  base                     the base model\n"
        "  cfg=base@4.5             the same with classifier-free guidance 4.5\n"
        "  marble=runs/demo         newest checkpoint of a run, averaged weights\n"
        "  runs/demo/checkpoints/step-000100        a certain checkpoint\n"
        "  nft=loras/nft.safetensors, org/name      a LoRA: file, folder or hub id\n"
        "The first one is what the others are compared with.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="[NAME=]MODEL[@GUIDANCE]", help="what is evaluated; forms below")
    parser.add_argument("--output", default="runs/evaluation", metavar="DIR", help="its folder (%(default)s)")
    parser.add_argument("--only", choices=STEPS, help="do one step; `score` and `report` take names of models, or all")
    origin = parser.add_argument_group("model and sampling (as in the preset, the file, or the first run)")
    either = origin.add_mutually_exclusive_group()
    either.add_argument("--preset", choices=PRESETS)
    either.add_argument("--config", metavar="FILE.yaml")
    origin.add_argument("--model", metavar="PATH", help="base model: folder, hub id, or tiny (model.path)")
    origin.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="model.dtype")
    origin.add_argument("--device", help="model.device")
    origin.add_argument("--steps", type=int, metavar="N", help="evaluation.steps")
    origin.add_argument("--solver", choices=get_args(Solver), help="evaluation.solver")
    origin.add_argument("--guidance", type=float, default=1.0, metavar="SCALE", help="where no @GUIDANCE is (1: none)")
    origin.add_argument("--batch-size", type=int, metavar="N", help="pictures per forward pass (sampling.batch_size)")
    origin.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other value")
    what = parser.add_argument_group("prompts and metrics")
    what.add_argument(
        "--prompts", action="append", default=[], metavar="SOURCE=FILE", help="instead of evaluation.sources"
    )
    what.add_argument("--prompts-per-source", metavar="N|all", help="evaluation.prompts_per_source")
    what.add_argument("--samples", type=int, default=1, metavar="N", help="pictures per prompt (%(default)s)")
    what.add_argument("--metrics", metavar="A,B,...", help="evaluation.metrics; without these, the training rewards")
    return parser
