"""Commands on the pages would start: programs exist, their own parsers take every option, keys are known."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path

import pytest

from gradbalance_diffusers import cli
from gradbalance_diffusers.evaluating import cli as evaluation
from gradbalance_diffusers.run_folder import RunFolder
from pages import ROOT, Block, blocks

LAUNCHERS = {
    "torchrun": {"--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id"},
    "accelerate launch": {"--num_processes"},
}
FOREIGN = {"hf download", "git clone", "python -m sglang.launch_server", ".", "cd"}
"""Programs of others, by the words they begin with."""
PLACEHOLDERS = {"<this repository>": "REPOSITORY"}
EXAMPLES = {"examples/sd35_marble.py": cli.parse_arguments, "examples/evaluate_sd35.py": evaluation.parse_arguments}


def commands(block: Block) -> Iterator[list[str]]:
    """Words of every command of a block: lines joined, comments dropped, loops and braces written out once."""
    text = re.sub(r"\\\n\s*", " ", block.code)
    for placeholder, word in PLACEHOLDERS.items():
        text = text.replace(placeholder, word)
    text = re.sub(r"for (\w+) in (\w+)[^;]*; do (.*?); done", lambda m: m[3].replace(f"${m[1]}", m[2]), text)
    text = re.sub(r"(\S*)\{(\w+(?:,\w+)+)\}(\S*)", lambda m: " ".join(m[1] + x + m[3] for x in m[2].split(",")), text)
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


COMMANDS = [(block, words) for block in blocks("bash") for words in commands(block)]


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=[" ".join(words)[:60] for _, words in COMMANDS])
def test_command_would_start(block: Block, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {word for word in words if word.startswith("runs/")} | {
        word.partition("=")[2] for word in words if "=runs/" in word
    }
    monkeypatch.chdir(tmp_path)
    for folder in folders:  # a finished run, where a command goes on from one
        with RunFolder(Path(folder)) as run:
            run.write_config(cli.load_config("tiny", []))
    check(words)


def check(words: Sequence[str]) -> None:
    """Raise where a command would not start."""
    begin = " ".join(words)
    if any(begin == known or begin.startswith(f"{known} ") for known in FOREIGN):
        return
    program, *rest = words
    for launcher, options in LAUNCHERS.items():
        if begin.startswith(f"{launcher} "):
            check(["python", *launched(begin.removeprefix(f"{launcher} "), options)])
            return
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), rest
    elif program.endswith("pip"):
        check_extras(rest)
    elif program.endswith("python") or program == "python3":
        check_python(rest)
    else:
        raise AssertionError(f"what is {program!r}?")


def launched(text: str, options: set[str]) -> list[str]:
    """The script and its words behind a launcher's own options, each with one value but for flags."""
    words = shlex.split(text)
    while words[0].startswith("--"):
        flag = words.pop(0)
        if flag != "--multi_gpu":
            assert flag in options, flag
            words.pop(0)
    return words


def check_extras(words: Sequence[str]) -> None:
    assert words[0] == "install"
    extras = set(metadata("gradbalance").get_all("Provides-Extra"))
    for word in words:
        if found := re.match(r"(?:gradbalance|\.)\[(.*?)\]", word):
            assert set(found[1].split(",")) <= extras, word


def check_python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        module, arguments = words[1], words[2:]
        assert importlib.util.find_spec(module), module
        if module in ("venv", "pytest"):
            return
        with_parser(lambda: runpy.run_module(module, run_name="__main__"), arguments)
        return
    script, arguments = words[0], words[1:]
    assert (ROOT / script).is_file(), script
    if script in EXAMPLES and not {"--print-config", "--only"} & set(arguments):
        EXAMPLES[script](arguments)
    elif arguments:
        with_parser(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), arguments)


class ParsedError(Exception):
    """A parser was content."""


def with_parser(program: Callable[[], object], arguments: Sequence[str]) -> None:
    """Run a program up to where its parser has taken the words."""

    def parse(self: argparse.ArgumentParser, *given: object) -> argparse.Namespace:
        _, unknown = self.parse_known_args(*given)
        assert not unknown, unknown
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # runpy warns of a module that is run after it was imported, here by a test of its own.
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", parse)
        patch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(ParsedError):
            program()


def test_no_foreign_program_is_left_over() -> None:
    begins = [" ".join(words) + " " for _, words in COMMANDS]
    assert not [known for known in FOREIGN if not any(begin.startswith(f"{known} ") for begin in begins)]


def test_a_wrong_option_is_found() -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(["python", "examples/sd35_marble.py", "--no-such-option"])
    with pytest.raises((AssertionError, SystemExit)):
        check(["python", "-m", "benchmarks.evidence", "--no-such-option"])
    with pytest.raises((AssertionError, SystemExit)):
        check(["make", "nothing"])
