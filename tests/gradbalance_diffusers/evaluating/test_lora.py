from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers.checkpoint import load_checkpoint
from gradbalance_diffusers.evaluating.lora import ADAPTER, LoRAWeights, applied, read_lora
from gradbalance_diffusers.evaluating.specs import ModelSpec, parse_spec
from gradbalance_diffusers.generator import load_pipeline
from gradbalance_diffusers.policy import LORA_FILE


def read(path: Path) -> LoRAWeights:
    lora = read_lora(parse_spec(f"x={path}"))
    assert lora is not None
    return lora


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a LoRA file, without metadata, whose tensors went through ``change``."""
    tensors = load_file(path / LORA_FILE)
    change(tensors)
    copy = path / "changed.safetensors"
    save_file(tensors, copy)
    return copy


def test_the_base_has_none() -> None:
    assert read_lora(parse_spec("base")) is None


def test_a_run_gives_the_averaged_weights_of_its_newest_checkpoint(trained_run: Path) -> None:
    checkpoint = load_checkpoint(trained_run / "checkpoints" / "step-000003")
    average = checkpoint.values["ema"]["average"]
    trained = load_file(checkpoint.lora["default"] / LORA_FILE)
    lora = read(trained_run)
    assert lora.notes["step"] == 3
    assert {name.removeprefix("transformer."): t for name, t in lora.tensors.items()}.keys() == average.keys()
    for name, tensor in average.items():
        assert torch.equal(lora.tensors[f"transformer.{name}"], tensor)
    assert any(not torch.equal(lora.tensors[name], tensor) for name, tensor in trained.items())
    assert lora.metadata["transformer.lora_alpha"] == 64
    assert read(checkpoint.path).sha256() == lora.sha256()
    assert read(checkpoint.lora["default"]).sha256() != lora.sha256()


def test_a_run_without_a_whole_checkpoint_is_refused(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained_run / "config.yaml", run)
    with pytest.raises(InvalidArgumentError, match="must have a checkpoint"):
        read(run)
    shutil.copytree(trained_run / "checkpoints" / "step-000002", run / "checkpoints" / "step-000002")
    (run / "checkpoints" / "step-000002" / "tensors.safetensors").write_bytes(b"damaged")
    with pytest.raises(StateError, match="damaged"), pytest.warns(UserWarning, match="damaged"):
        read(run)


def test_the_digest_is_of_the_weights_not_of_the_place(lora_path: Path, tmp_path: Path) -> None:
    lora = read(lora_path)
    elsewhere = shutil.copytree(lora_path, tmp_path / "elsewhere")
    assert read(elsewhere).sha256() == lora.sha256()
    metadata = dict(reversed(lora.metadata.items()))
    metadata["transformer.target_modules"] = metadata["transformer.target_modules"][::-1]
    assert LoRAWeights("", dict(reversed(lora.tensors.items())), metadata).sha256() == lora.sha256()
    assert LoRAWeights("", lora.tensors, metadata | {"transformer.lora_alpha": 1}).sha256() != lora.sha256()
    name = next(iter(lora.tensors))
    assert LoRAWeights("", lora.tensors | {name: lora.tensors[name] + 1}, metadata).sha256() != lora.sha256()


def test_weights_that_cannot_have_an_effect_are_refused(lora_path: Path) -> None:
    empty = changed(lora_path, dict.clear)
    with pytest.raises(InvalidArgumentError, match=r"changed\.safetensors must hold tensors\. Found none"):
        read(empty)
    other = changed(lora_path, lambda tensors: tensors.update({"unet.x.lora_A.weight": torch.zeros(1)}))
    with pytest.raises(InvalidArgumentError, match=r"Found 'unet\.x\.lora_A\.weight' \(1 such\)"):
        read(other)
    texts = changed(lora_path, lambda tensors: tensors.update({"text_encoder.x.lora_A.weight": torch.zeros(1)}))
    with pytest.raises(InvalidArgumentError, match=r"must change the transformer only\. Found 1 tensors"):
        read(texts)
    broken = changed(lora_path, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    with pytest.raises(InvalidArgumentError, match="Found NaN or Inf in 'transformer"):
        read(broken)


def test_a_folder_with_several_files_must_be_told_which(lora_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("a", "b"):
        shutil.copy(lora_path / LORA_FILE, folder / f"{name}.safetensors")
    with pytest.raises(InvalidArgumentError, match="Name the file"):
        read(folder)
    assert read(folder / "a.safetensors").sha256() == read(lora_path).sha256()


def test_what_is_neither_here_nor_on_the_hub_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidArgumentError, match=r"'org/name/x\.safetensors' .* There is no such folder"):
        read_lora(ModelSpec("x", "hub", "org/name/x.safetensors"))


def test_inside_the_block_it_is_what_diffusers_loads_and_afterwards_nothing(
    load_pipeline: Callable[[], StableDiffusion3Pipeline], lora_path: Path
) -> None:
    pipeline, plain = load_pipeline(), load_pipeline()
    untouched = output(pipeline)
    plain.load_lora_weights(lora_path)
    with applied(pipeline, read(lora_path)):
        assert torch.equal(output(pipeline), output(plain))
    assert torch.equal(output(pipeline), untouched)
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    with applied(pipeline, None):
        assert torch.equal(output(pipeline), untouched)


def test_a_half_precision_model_gets_the_weights_unrounded(pipeline_path: Path, lora_path: Path) -> None:
    pipeline = load_pipeline(pipeline_path, torch_dtype=torch.bfloat16, load_t5=False)
    lora = read(lora_path)
    with applied(pipeline, lora):
        found = {n: p for n, p in pipeline.transformer.named_parameters() if ADAPTER in n}
        assert len(found) == len(lora.tensors)
        for name, parameter in found.items():
            assert torch.equal(parameter, lora.tensors[f"transformer.{name.replace(f'.{ADAPTER}', '')}"])
            assert not parameter.requires_grad


def test_weights_for_another_model_are_refused_and_leave_nothing(
    load_pipeline: Callable[[], StableDiffusion3Pipeline], lora_path: Path
) -> None:
    pipeline = load_pipeline()
    deeper = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"

    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        for factor in "AB":
            name = deeper.replace("lora_A", f"lora_{factor}")
            tensors[name.replace("blocks.0", "blocks.9")] = tensors[name].clone()

    with (
        pytest.raises(InvalidArgumentError, match=r"2 of its \d+ tensors have no layer there, such as .*blocks\.9"),
        applied(pipeline, read(changed(lora_path, add_layer))),
    ):
        pass
    wider = changed(lora_path, lambda tensors: tensors.update({deeper: torch.ones(4, 99)}))
    with pytest.raises(InvalidArgumentError, match="must fit the base model"), applied(pipeline, read(wider)):
        pass
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())


@torch.no_grad()
def output(pipeline: StableDiffusion3Pipeline) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return pipeline.transformer(
        hidden_states=torch.randn(1, 4, 8, 8, generator=generator),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 12, 32, generator=generator),
        pooled_projections=torch.randn(1, 32, generator=generator),
        return_dict=False,
    )[0]
