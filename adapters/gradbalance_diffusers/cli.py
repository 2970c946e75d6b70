"""Command line of a training run: a preset or a file, any value replaced, and what to do with an existing run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from gradbalance.errors import GradBalanceError

from .config import PRESETS, Config, load_config
from .schema import Section, describe, field_docs, type_hints
from .sections import Method
from .session import first_rank_prints


@dataclass(frozen=True)
class Arguments:
    """What the command line asked for.

    Attributes:
        config: The whole configuration.
        resume: Continue the run in ``config.run.folder``.
        overwrite: Replace the run in ``config.run.folder``.
        dry_run: Check everything on a few samples and stop.
    """

    config: Config
    resume: bool
    overwrite: bool
    dry_run: bool


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Read a command line; prints a message and ends the program on ``--help``, ``--print-config`` or a mistake.

    Without ``--preset`` and ``--config`` a new run takes the preset ``tiny`` and says so; ``--resume`` takes the
    configuration that the run was started with.

    Args:
        arguments: Words of the command line; None takes those of the program.

    >>> parse_arguments(["--preset", "tiny", "--epochs", "3", "optimizer.lr=1e-3"]).config.optimizer.lr
    0.001
    """
    with first_rank_prints():
        parser = _parser()
        given = parser.parse_intermixed_args(arguments)
        try:
            config = load_config(_origin(given), [*given.overrides, *_shortcuts(given)])
        except GradBalanceError as error:
            parser.error(str(error))
        if given.print_config:
            print(config.to_yaml(), end="")
            parser.exit()
    return Arguments(config, given.resume, given.overwrite, given.dry_run)


def _origin(given: argparse.Namespace) -> str:
    """The preset or file to begin with; what is chosen without being asked for is printed."""
    if given.config or given.preset:
        return str(given.config or given.preset)
    if given.resume and given.output and (saved := Path(given.output) / "config.yaml").is_file():
        print(f"Configuration of the run to resume: {saved}")
        return str(saved)
    if not given.print_config:
        found = "CUDA found" if torch.cuda.is_available() else "No CUDA found"
        print(f"{found}, no --preset given: training the packaged tiny SD3. --preset sd35-medium trains SD3.5 Medium.")
    return "tiny"


def _shortcuts(given: argparse.Namespace) -> list[str]:
    """Options that stand for one key each. They come after the overrides, so they win."""
    keys = {
        "run.seed": given.seed,
        "run.epochs": given.epochs,
        "run.threads": given.threads,
        "balance.method": given.balance,
    }
    folder = [] if given.output is None else [f"run.folder={json.dumps(given.output)}"]
    return folder + [f"{key}={value}" for key, value in keys.items() if value is not None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fine-tune a Stable Diffusion 3 model on several rewards at once, with balanced gradients.",
        epilog="keys for section.key=value:\n\n" + _key_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace a value; keys are below")
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--preset", choices=PRESETS, help="a recipe; without one: tiny")
    origin.add_argument("--config", metavar="FILE.yaml", help="a configuration of your own")
    parser.add_argument("--output", metavar="DIR", help="folder of the run (run.folder)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in that folder")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in that folder")
    parser.add_argument("--seed", type=int, metavar="N", help="run.seed")
    parser.add_argument("--epochs", type=int, metavar="N", help="run.epochs")
    parser.add_argument("--threads", type=int, metavar="N", help="run.threads")
    parser.add_argument("--balance", choices=get_args(Method), help="balance.method")
    parser.add_argument("--dry-run", action="store_true", help="check files, model, prompts and rewards, and stop")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")
    return parser


def _key_help() -> str:
    """Every key with its meaning and what it may be, from the docstrings of the configuration."""
    lines = []
    for section, hint in type_hints(Config).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            hints = type_hints(hint)
            for name, text in field_docs(hint).items():
                lines += [f"  {section}.{name}", f"      {text}", f"      ({describe(hints[name])})"]
        else:
            lines += [f"  {section}", f"      {field_docs(Config)[section]}", f"      ({describe(hint)})"]
    return "\n".join(lines)
