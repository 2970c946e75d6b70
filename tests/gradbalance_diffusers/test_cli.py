import pytest
import torch

from gradbalance_diffusers.cli import parse_arguments
from gradbalance_diffusers.config import Config, load_config


def test_options_and_overrides_in_any_order():
    words = "optimizer.lr=1e-3 --preset tiny loss.center=false --seed 4 --overwrite --output"
    arguments = parse_arguments([*words.split(), 'a "b": c'])
    config = arguments.config
    assert (config.optimizer.lr, config.loss.center, config.run.seed, config.run.folder) == (1e-3, False, 4, 'a "b": c')
    assert (arguments.resume, arguments.overwrite, arguments.dry_run) == (False, True, False)
    assert parse_arguments(["--preset", "tiny", "--dry-run"]).dry_run


def test_options_win_over_overrides():
    config = parse_arguments(["--preset", "tiny", "--balance", "mean", "balance.method=nash", "--threads", "1"]).config
    assert (config.balance.method, config.run.threads) == ("mean", 1)


@pytest.mark.parametrize(("cuda", "words"), [(False, "No CUDA found"), (True, "CUDA found, no --preset")])
def test_without_a_preset_tiny_is_taken_and_said(capsys, monkeypatch, cuda, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert parse_arguments([]).config == load_config("tiny")
    out = capsys.readouterr().out
    assert out.startswith(words)
    assert "--preset sd35-medium" in out


def test_resume_takes_the_configuration_of_the_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(load_config("tiny", ["optimizer.lr=7e-4"]).to_yaml())
    arguments = parse_arguments(["--resume", "--output", str(tmp_path), "--epochs", "99"])
    assert (arguments.config.optimizer.lr, arguments.config.run.epochs, arguments.resume) == (7e-4, 99, True)
    assert arguments.config.run.folder == str(tmp_path)
    assert str(tmp_path / "config.yaml") in capsys.readouterr().out


def test_print_config_prints_a_configuration_that_can_be_read(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--print-config", "run.epochs=5"])
    assert caught.value.code == 0
    assert Config.from_yaml(capsys.readouterr().out) == load_config("tiny", ["run.epochs=5"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lrr=1"], "Did you mean `optimizer.lr`"),
        (["--preset", "tiny", "--config", "a.yaml"], "not allowed with"),
        (["--resume", "--overwrite"], "not allowed with"),
        (["--config", "absent.yaml"], "existing .yaml file"),
        (["--balance", "magic"], "invalid choice"),
        (["--epochs", "0"], "`run.epochs` must be a whole number >= 1"),
    ],
)
def test_mistakes_end_with_a_message_and_no_traceback(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    out = capsys.readouterr().out
    for key in ("optimizer.lr", "balance.ema_decay", "evaluation.saved_images", "stages", "rewards"):
        assert f"  {key}\n" in out
