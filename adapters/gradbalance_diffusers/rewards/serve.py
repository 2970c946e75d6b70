"""Serve a reward over HTTP: ``python -m gradbalance_diffusers.rewards.serve ocr --port 8000``."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from typing import Any

from gradbalance.errors import GradBalanceError, InvalidArgumentError

from ..yaml_format import parse_yaml
from . import make_reward
from .http_server import RewardServer

MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; returns after SIGTERM or Ctrl-C, once the request being scored is answered."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        reward = make_reward(given.reward, **_options(given.option))
        server = RewardServer(
            reward,
            name=given.reward,
            address=(given.host, given.port),
            max_bytes=given.max_mib * MIB,
            max_pixels=given.max_megapixels * MIB,
        )
    except (GradBalanceError, TypeError) as error:  # TypeError: an option of another type
        parser.error(str(error))
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        parser.error(f"cannot listen on {given.host}:{given.port}: {error}")
    with server:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, as Ctrl-C does
        print(f"Serving {given.reward} at {server.url} until SIGTERM or Ctrl-C.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once
            print("Stopping after the request being scored.", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradbalance_diffusers.rewards.serve",
        description="Serve a reward over HTTP, for the reward `http` of a training run elsewhere.",
    )
    parser.add_argument("reward", help="name of a reward, or package.module:attribute of your own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="argument of the reward, the value as YAML"
    )
    parser.add_argument("--max-mib", type=int, default=64, metavar="N", help="largest request in MiB (default: 64)")
    parser.add_argument(
        "--max-megapixels",
        type=int,
        default=64,
        metavar="N",
        help="most pixels of all pictures of a request, in 2**20 (default: 64)",
    )
    return parser


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Options of the reward from ``key=value`` words."""
    options = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidArgumentError(f"--option must look like key=value, such as threads=2. Found {word!r}.")
        options[key] = parse_yaml(text, f"--option {word}")
    return options


if __name__ == "__main__":
    main()
