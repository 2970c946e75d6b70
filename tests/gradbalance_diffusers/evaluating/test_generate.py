from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers.assembly import evaluation_prompts
from gradbalance_diffusers.config import Config
from gradbalance_diffusers.evaluating import generate as module
from gradbalance_diffusers.evaluating.folder import EvaluationFolder
from gradbalance_diffusers.evaluating.generate import Sampling, generate
from gradbalance_diffusers.evaluating.specs import parse_specs
from gradbalance_diffusers.evaluating.work import Picture
from gradbalance_diffusers.figures import to_image
from gradbalance_diffusers.policy import SD3Policy
from gradbalance_diffusers.prompts import Prompt
from gradbalance_diffusers.sections import ModelConfig

Run = Callable[..., EvaluationFolder]


@pytest.fixture
def run(tmp_path: Path, prompts: list[Prompt], model: ModelConfig, sampling: Sampling) -> Run:
    """A function that generates the pictures of some models, in small batches unless said."""

    def run(*models: str, place: str = "evaluation", **changes: object) -> EvaluationFolder:
        folder = EvaluationFolder(tmp_path / place)
        arguments: dict = {"model": model, "sampling": sampling, "batch_size": 2} | changes
        generate(folder, parse_specs(models), arguments.pop("prompts", prompts), **arguments)
        return folder

    return run


def contents(folder: EvaluationFolder, model: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder.path / "models" / model / "images").iterdir())}


def pixels(content: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(content)))


def plain_picture(pipeline: StableDiffusion3Pipeline, text: str, seed: int, guidance: float = 1.0) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        text,
        num_inference_steps=2,
        guidance_scale=guidance,
        max_sequence_length=0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images[0]
    return np.array(to_image(image))


def test_pictures_are_those_of_the_plain_pipeline(
    run: Run, load_pipeline: Callable[[], StableDiffusion3Pipeline], lora_path: Path
) -> None:
    folder = run("base", "cfg=base@3", f"lora={lora_path}", batch_size=1, samples=2)
    pipeline = load_pipeline()
    for picture, text, seed in ((Picture(0, 0), "a cat", 50), (Picture(2, 1), "two dogs", 55)):
        made = {name: pixels(folder.image_path(name, picture).read_bytes()) for name in ("base", "cfg")}
        assert np.array_equal(made["base"], plain_picture(pipeline, text, seed))
        assert np.array_equal(made["cfg"], plain_picture(pipeline, text, seed, guidance=3.0))
    pipeline.load_lora_weights(lora_path)
    made_with_lora = pixels(folder.image_path("lora", Picture(2, 1)).read_bytes())
    assert np.array_equal(made_with_lora, plain_picture(pipeline, "two dogs", 55))
    assert contents(folder, "lora").keys() == contents(folder, "base").keys()
    assert contents(folder, "lora") != contents(folder, "base")


def test_a_run_gives_the_pictures_that_training_evaluated(run: Run, trained_run: Path) -> None:
    config = Config.from_yaml((trained_run / "config.yaml").read_text())
    folder = run(
        "base",
        f"marble={trained_run}",
        prompts=evaluation_prompts(config),
        model=config.model,
        sampling=Sampling.from_config(config),
        batch_size=config.sampling.batch_size,
    )
    for model, epoch in (("base", 0), ("marble", 3)):
        made = list(contents(folder, model).values())
        kept = sorted((trained_run / "evaluations" / f"epoch-{epoch:04d}").glob("0*.png"))
        assert len(made) == len(kept) == 6
        assert all(np.array_equal(pixels(a), pixels(b.read_bytes())) for a, b in zip(made, kept, strict=True))
    assert contents(folder, "base") != contents(folder, "marble")


def test_interrupted_and_continued_gives_the_same_bytes(
    run: Run, lora_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ("base", f"lora={lora_path}")
    whole = run(*models, place="whole", samples=2)
    save, left = EvaluationFolder.save_image, 9

    def stop(folder: EvaluationFolder, *arguments: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        save(folder, *arguments)

    monkeypatch.setattr(EvaluationFolder, "save_image", stop)
    with pytest.raises(KeyboardInterrupt):
        run(*models, place="broken", samples=2)
    monkeypatch.undo()
    broken = EvaluationFolder(whole.path.parent / "broken")
    assert (len(broken.pictures("base")), len(broken.pictures("lora"))) == (6, 3)
    first = broken.image_path("lora", Picture(0, 0)).stat().st_mtime_ns
    run(*models, place="broken", samples=2)
    assert all(contents(broken, name) == contents(whole, name) for name in ("base", "lora"))
    assert broken.image_path("lora", Picture(0, 0)).stat().st_mtime_ns == first


def test_more_samples_add_pictures_and_change_none(run: Run) -> None:
    before = contents(run("base"), "base")
    after = contents(run("base", samples=2), "base")
    assert len(after) == 2 * len(before)
    assert before.items() <= after.items()
    assert after == contents(run("base", place="at once", samples=2), "base")


def test_the_batch_size_changes_no_more_than_the_last_bit(run: Run) -> None:
    one, all_at_once = (contents(run("base", place=f"of {n}", batch_size=n), "base") for n in (1, 3))
    differences = [np.abs(pixels(one[k]).astype(int) - pixels(all_at_once[k])).max() for k in one]
    assert max(differences) <= 1


def test_complete_pictures_need_no_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run("base")
    monkeypatch.setattr(module, "load_generator", lambda *_, **__: pytest.fail("the model was loaded"))
    run("base")
    assert "All 3 pictures of 1 models are there already." in capsys.readouterr().out


def test_other_settings_are_refused(
    run: Run, sampling: Sampling, model: ModelConfig, lora_path: Path, load_random_policy: Callable[..., SD3Policy]
) -> None:
    run("base", f"x={lora_path}")
    with pytest.raises(
        StateError, match=r"'base' .* \(sampling.steps: 2 there, 3 now; sampling.seed: 50 there, 9 now\)"
    ):
        run("base", sampling=replace(sampling, steps=3, seed=9))
    with pytest.raises(StateError, match=r"sampling.guidance_scale: 1.0 there, 2.0 now"):
        run("base=base@2")
    with pytest.raises(StateError, match=r"model.dtype: 'float32' there, 'bfloat16' now"):
        run("base", model=replace(model, dtype="bfloat16"))
    load_random_policy(rank=2).save_lora(lora_path)
    with pytest.raises(StateError, match=r"lora.sha256"):
        run(f"x={lora_path}")


def test_a_lora_without_effect_is_named(run: Run, lora_path: Path, load_policy: Callable[..., SD3Policy]) -> None:
    load_policy().save_lora(lora_path)  # B is zero, as before training
    with pytest.raises(InvalidArgumentError, match=rf"The LoRA {lora_path} must change the model.*bit for bit"):
        run("base", f"untrained={lora_path}")
    assert run("base").models() == ["base"]


def test_a_lora_that_breaks_the_model_is_named(
    run: Run, lora_path: Path, load_random_policy: Callable[..., SD3Policy]
) -> None:
    policy = load_random_policy()
    for parameter in policy.parameters.values():
        parameter.data.mul_(1e30)
    policy.save_lora(lora_path)
    with pytest.raises(InvalidArgumentError, match=r"must give finite pictures"):
        run(f"broken={lora_path}")


def test_the_effect_is_told(run: Run, lora_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(f"nft={lora_path}")
    assert "nft: the LoRA moves the first denoising step by" in capsys.readouterr().out


def test_another_base_than_in_training_warns(run: Run, trained_run: Path, tmp_path: Path, model: ModelConfig) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(model.path)
    with pytest.warns(UserWarning, match=rf"was trained on '{model.path}' and is evaluated on '{moved}'"):
        run(f"marble={trained_run}", model=replace(model, path=str(moved)))


def test_a_run_that_was_trained_on_is_told_by_its_step(run: Run, trained_run: Path) -> None:
    run(f"x={trained_run / 'checkpoints' / 'step-000002'}")
    with pytest.raises(StateError, match=r"lora\.step: 2 there, 3 now"):
        run(f"x={trained_run}")


def test_text_encoders_may_wait_on_the_cpu(run: Run, model: ModelConfig) -> None:
    kept = contents(run("base@3", place="kept"), "base-cfg3")
    waiting = run("base@3", place="waiting", model=replace(model, text_encoders="offload"))
    assert contents(waiting, "base-cfg3") == kept


def test_a_base_model_that_is_not_there_can_be_corrected(run: Run, model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`model\.path` must be a local path .*nowhere.* Check the path"):
        run("base", model=replace(model, path=str(tmp_path / "nowhere")))
    assert run("base").models() == ["base"]
