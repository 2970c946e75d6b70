from __future__ import annotations

from pathlib import Path

import pytest

from gradbalance_diffusers.assembly import evaluation_prompts
from gradbalance_diffusers.config import Config, load_config
from gradbalance_diffusers.evaluating.cli import parse_arguments
from gradbalance_diffusers.evaluating.folder import EvaluationFolder
from gradbalance_diffusers.evaluating.generate import Sampling
from gradbalance_diffusers.evaluating.specs import ModelSpec
from gradbalance_diffusers.evaluating.table import PAPER
from gradbalance_diffusers.sections import RewardConfig


def refused(capsys: pytest.CaptureFixture, *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_run_brings_its_model_prompts_and_solver(trained_run: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = parse_arguments(["base", f"marble={trained_run}"])
    config = Config.from_yaml((trained_run / "config.yaml").read_text())
    assert arguments.config.model == config.model
    assert arguments.sampling() == Sampling.from_config(config)
    assert arguments.metrics == config.rewards
    assert (arguments.samples, arguments.config.sampling.batch_size) == (1, config.sampling.batch_size)
    assert evaluation_prompts(arguments.config) == evaluation_prompts(config)
    assert arguments.specs() == [ModelSpec("base", "base"), ModelSpec("marble", "run", str(trained_run))]
    assert arguments.steps == ("generate", "score", "report")
    assert str(trained_run / "config.yaml") in capsys.readouterr().out


def test_a_checkpoint_brings_those_of_its_run(trained_run: Path) -> None:
    arguments = parse_arguments([str(trained_run / "checkpoints" / "step-000003")])
    assert arguments.config.model.height == 16


def test_a_preset_comes_before_the_run(trained_run: Path) -> None:
    arguments = parse_arguments(["--preset", "sd35-medium", str(trained_run)])
    assert arguments.config.model == load_config("sd35-medium").model


def test_without_either_the_tiny_model_is_taken_and_said(capsys: pytest.CaptureFixture) -> None:
    assert parse_arguments(["base"]).config.model.path == "tiny"
    assert "--preset sd35-medium" in capsys.readouterr().out


def test_options_replace_values(tmp_path: Path) -> None:
    words = "--preset tiny base --model some/model --dtype bfloat16 --device cuda:1 --steps 7 --solver dpm++2m"
    words += " --guidance 4.5 --batch-size 3 --samples 4 --metrics ocr,geneval,pickscore --set model.load_t5=true"
    words += f" --prompts ocr={tmp_path / 'signs.txt'} --prompts-per-source all --output out"
    arguments = parse_arguments(words.split())
    model, sampling = arguments.config.model, arguments.sampling()
    assert (model.path, model.dtype, model.device, model.load_t5) == ("some/model", "bfloat16", "cuda:1", True)
    assert (sampling.steps, sampling.solver, sampling.guidance_scale) == (7, "dpm++2m", 4.5)
    assert (arguments.config.sampling.batch_size, arguments.samples) == (3, 4)
    assert arguments.config.evaluation.sources == {"ocr": str(tmp_path / "signs.txt")}
    # A metric of the configuration keeps its options; any other is a reward by its own name.
    assert [metric.scorer for metric in arguments.metrics] == ["ocr", "geneval_geometry", "pickscore"]
    assert arguments.output == Path("out")
    (tmp_path / "signs.txt").write_text("".join(f'a "{i}"\n' for i in range(300)))
    assert len(evaluation_prompts(arguments.config)) == 300


def test_metrics_of_the_configuration_come_before_the_rewards() -> None:
    arguments = parse_arguments(
        ["--preset=tiny", "base", "--set", "evaluation.metrics=[ocr, {name: g, kind: geneval}]"]
    )
    assert arguments.metrics == [RewardConfig(name="ocr"), RewardConfig(name="g", kind="geneval")]


def test_scoring_takes_what_the_folder_was_made_for(tmp_path: Path) -> None:
    metrics = [RewardConfig(name="strict", kind="geneval", options={"score": "strict"}), RewardConfig(name="ocr")]
    EvaluationFolder(tmp_path).add_metrics(metrics)
    words = ["--only=score", f"--output={tmp_path}"]
    assert [(m.name, m.scorer, m.options) for m in parse_arguments(words).metrics] == [
        ("strict", "geneval", {"score": "strict"}),
        ("ocr", "ocr", {}),
    ]
    named = parse_arguments([*words, "--metrics=strict,hpsv2"]).metrics
    assert [(m.name, m.options) for m in named] == [("strict", {"score": "strict"}), ("hpsv2", {})]
    assert parse_arguments([*words, "--preset=sd35-medium"]).metrics == load_config("sd35-medium").metrics


def test_scoring_and_reporting_take_names_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert parse_arguments(["--only", "score", "--metrics", "ocr"]).names == []
    assert "Say what to score" in refused(capsys, "--only", "score", "--output", str(tmp_path / "new"))
    again = parse_arguments(["--only", "report", "base", "gone=runs/elsewhere"])
    assert (again.steps, again.names) == (("report",), ["base", "gone"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Name at least one model"),
        (["nowhere"], "no such folder or file"),
        (["base", "base"], "Found ['base'] twice"),
        (["base", "--guidance", "0.5"], "--guidance must be at least 1"),
        (["base", "--samples", "0"], "--samples must be at least 1"),
        (["base", "--prompts-per-source", "some"], "a whole number or 'all'"),
        (["base", "--prompts-per-source", "0"], "`evaluation.prompts_per_source` must be"),
        (["base", "--prompts", "ocr"], "--prompts must look like"),
        (["base", "--set", "model.hight=4"], "Did you mean `model.height`"),
        (["base", "--steps", "0"], "`evaluation.steps` must be"),
        (["base", "--metrics", "ocr,ocrr"], "Did you mean 'ocr'"),
    ],
)
def test_mistakes_are_told(words: list[str], expected: str, capsys: pytest.CaptureFixture) -> None:
    assert expected in refused(capsys, "--preset=tiny", *words)


def test_the_preset_scores_the_table_of_the_paper() -> None:
    metrics = parse_arguments(["--preset=sd35-medium", "base"]).metrics
    assert [metric.name for metric in metrics] == list(PAPER)
    assert all(metric.scorer == metric.name for metric in metrics)
    assert metrics[0].options == {"score": "accuracy"}  # the official rule, not the partial credit of training
