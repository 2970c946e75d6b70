"""The estimate against what can be counted and measured on small models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.embeddings import PromptEmbeddings
from gradbalance_diffusers.estimate import estimate_table, main
from gradbalance_diffusers.memory_estimate import MemoryItem, activation_bytes, memory_items, peak_bytes
from gradbalance_diffusers.model_shapes import sd35_medium_shapes, shapes_of
from gradbalance_diffusers.policy import ATTENTION_PROJECTIONS, SD3Policy
from gradbalance_diffusers.roles import AdapterRoles
from gradbalance_diffusers.time_estimate import BACKWARD, epoch_flops, seconds
from small_run import Make

GIB = 2**30


@pytest.fixture(scope="module")
def paper() -> Any:
    return load_config("sd35-medium")


@pytest.fixture(scope="module")
def sd35(paper: Any) -> Any:
    return sd35_medium_shapes(paper.model)


def test_sd35_medium_has_its_published_sizes(sd35: Any) -> None:
    embedding = 384**2 * 1536  # the buffer of positions
    assert sd35.transformer_bytes == 2 * (2_243_171_520 + embedding)
    assert sd35.vae_bytes == 2 * 83_819_683
    assert sd35.encoder_bytes // 2 == pytest.approx(123_650_304 + 694_659_840 + 4_762_310_656, abs=300)
    assert (sd35.image_tokens, sd35.text_tokens, sd35.latent_shape) == (1024, 205, (16, 64, 64))
    assert sd35.embedding_bytes == 2 * (205 * 4096 + 2048)
    # 24 blocks x 8 projections of 1536 x 1536, but for the one that the last block lacks.
    assert sd35.lora_parameters == 191 * 32 * 2 * 1536


def test_sd35_forward_pass_by_hand(sd35: Any) -> None:
    d, image, text = 1536, 1024, 205
    linear = 24 * 12 * image + 13 * 4 * image + 23 * 12 * text + 3 * text
    attention = 24 * 2 * (image + text) ** 2 * d + 13 * 2 * image**2 * d
    assert sd35.forward_flops == pytest.approx(2 * (linear * d**2 + attention), rel=0.01)


def test_without_t5_its_bytes_and_tokens_are_gone(paper: Any, sd35: Any) -> None:
    small = sd35_medium_shapes(load_config("sd35-medium", ["model.load_t5=false", "model.max_sequence_length=0"]).model)
    assert sd35.encoder_bytes - small.encoder_bytes == 2 * 4_762_310_656
    assert (small.text_tokens, small.embedding_bytes) == (77, 2 * (77 * 4096 + 2048))


def test_sizes_of_a_loaded_policy_are_counted(load_policy: Callable[..., SD3Policy], load_pipeline: Any) -> None:
    policy, plain = load_policy(), load_pipeline()
    config = load_config("tiny", ["model.height=16", "model.width=16", "model.max_sequence_length=0"]).model
    shapes = shapes_of(policy, config)
    assert shapes.transformer_bytes == sum(
        t.nbytes for t in [*plain.transformer.parameters(), *plain.transformer.buffers()]
    )
    assert shapes.vae_bytes == sum(p.nbytes for p in plain.vae.parameters())
    assert shapes.lora_parameters == sum(p.numel() for p in policy.parameters.values())
    encoded = PromptEmbeddings(torch.zeros(1, 12, 32), torch.zeros(1, 32))
    assert shapes.embedding_bytes == encoded.prompt_embeds.nbytes + encoded.pooled.nbytes
    math = sdpa_kernel(SDPBackend.MATH)  # the counter does not know the fused attention of CPUs
    with math, FlopCounterMode(display=False) as counter, policy.role("reference"), torch.no_grad():
        policy.velocity(torch.randn(1, *shapes.latent_shape), torch.tensor([0.5]), encoded)
    assert shapes.forward_flops == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        assert policy.decode(torch.zeros(1, *shapes.latent_shape)).shape[2:] == shapes.image_size
    assert shapes.decode_flops == counter.get_total_flops()


def small_network(
    layers: int, dual: int, side: int, text: int, width: int, checkpointing: bool, dtype: torch.dtype = torch.float32
) -> tuple[SD3Transformer2DModel, dict[str, torch.Tensor]]:
    """A transformer with LoRA for latents of side x side, and inputs of two pictures."""
    network = SD3Transformer2DModel(
        sample_size=side,
        num_layers=layers,
        dual_attention_layers=tuple(range(dual)),
        num_attention_heads=4,
        attention_head_dim=width // 4,
        caption_projection_dim=width,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=side,
        in_channels=4,
        out_channels=4,
        qk_norm="rms_norm",
    ).eval()
    roles = AdapterRoles(network.to(dtype), rank=4, alpha=8, target_modules=ATTENTION_PROJECTIONS)
    if checkpointing:
        network.enable_gradient_checkpointing(roles.checkpointed)
    inputs = {
        "hidden_states": torch.randn(2, 4, side, side, dtype=dtype),
        "timestep": torch.rand(2),
        "encoder_hidden_states": torch.randn(2, text, 64, dtype=dtype),
        "pooled_projections": torch.randn(2, 32, dtype=dtype),
    }
    return network, inputs


def saved_bytes(network: SD3Transformer2DModel, inputs: dict[str, torch.Tensor], autocast: bool) -> int:
    """Bytes of the distinct storages that a forward pass keeps, but for weights and their half-precision copies."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*network.parameters(), *network.buffers()]}
    shapes = {shape for p in network.parameters() for shape in (tuple(p.shape), tuple(p.shape[::-1]))}
    saved: dict[int, int] = {}
    alive = []  # so that no storage is given out twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context:
        assert network(**inputs).sample.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16 base"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dual", [False, True])
def test_activations_of_a_block_are_those_that_autograd_keeps(precision: str, checkpointing: bool, dual: bool) -> None:
    """Four blocks more: what the first and the last block lack cancels."""
    measured, estimated = [], []
    for layers in (3, 7):
        dtype = torch.bfloat16 if precision == "bfloat16 base" else torch.float32
        network, inputs = small_network(layers, layers * dual, 24, 20, 256, checkpointing, dtype)
        measured.append(saved_bytes(network, inputs, autocast=precision != "float32"))
        sizes = _Sizes(layers, layers * dual, 256, 144, 20)
        element = 4 if precision == "float32" else 2
        estimated.append(2 * activation_bytes(sizes, element=element, checkpointing=checkpointing))
    assert measured[1] - measured[0] == pytest.approx(estimated[1] - estimated[0], rel=0.05)


class _Sizes:
    def __init__(self, layers: int, dual_layers: int, width: int, image_tokens: int, text_tokens: int) -> None:
        self.layers, self.dual_layers, self.width = layers, dual_layers, width
        self.image_tokens, self.text_tokens = image_tokens, text_tokens


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_pass_takes_the_operations_that_are_assumed(checkpointing: bool) -> None:
    network, inputs = small_network(12, 6, side=24, text=60, width=256, checkpointing=checkpointing)
    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the fused attention of CPUs
        with FlopCounterMode(display=False) as forward:
            velocity = network(**inputs).sample
        with FlopCounterMode(display=False) as backward:
            velocity.square().mean().backward()
    assert backward.get_total_flops() / forward.get_total_flops() == pytest.approx(BACKWARD + checkpointing, rel=0.1)


def test_counted_memory_is_what_a_run_holds(make: Make) -> None:
    trainer = make("run", "run.epochs=1", "evaluation.every=100")
    trainer.train_epoch(0)
    shapes = shapes_of(trainer.policy, trainer.config.model)
    found = {item.name: item.bytes for item in memory_items(shapes, trainer.config)}
    policy, update = trainer.policy, trainer.update
    held = [*policy.parameters.values(), *policy.old_parameters.values(), *update.ema.state_dict()["average"].values()]
    assert found["LoRA: trained, old, average"] == sum(tensor.nbytes for tensor in held)
    states = update.inner_optimizer.state.values()
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    assert found["AdamW moments"] == sum(tensor.nbytes for tensor in moments)
    assert found["LoRA gradients"] == shapes.lora_parameters * 4
    assert found["rows of 3 objectives"] == 3 * shapes.lora_parameters * 4
    assert update.meter is not None
    assert found["sums that tell conflicts"] == sum(block.nbytes for block in update.meter.state_dict()["sums"])
    assert found["clean latents of 12 pictures"] == 12 * 4 * math.prod(shapes.latent_shape)
    assert found["pictures that wait for rewards, at most"] == 12 * 3 * 16 * 16 * 4
    cached = trainer.encoder._cache.values()
    size = sum(e.prompt_embeds.nbytes + e.pooled.nbytes for e in cached)
    (embeddings,) = [value for name, value in found.items() if name.startswith("embeddings")]
    assert embeddings / size == (1 * 3 + 2 * 3) / len(cached)


def test_phases_follow_the_options(sd35: Any) -> None:
    def peak(*overrides: str, gpus: int = 1) -> float:
        return peak_bytes(memory_items(sd35, load_config("sd35-medium", overrides), gpus)) / GIB

    kept = peak("model.text_encoders=keep")
    assert peak("model.text_encoders=offload") < kept - 1
    assert peak("optimizer.micro_batch_size=6", "model.gradient_checkpointing=false") > peak(
        "optimizer.micro_batch_size=6"
    )
    large = ("optimizer.micro_batch_size=72", "model.gradient_checkpointing=true")  # training needs most
    rows = 4 * sd35.lora_parameters / GIB
    assert peak(*large) - peak(*large, "balance.method=weighted-sum") == pytest.approx(4 * rows)
    names = {item.name for item in memory_items(sd35, load_config("sd35-medium"))}
    assert "sums that tell conflicts" not in names
    items = memory_items(sd35, load_config("sd35-medium"), gpus=8)
    (latents,) = [item for item in items if item.name.startswith("clean latents")]
    assert latents == MemoryItem("clean latents of 144 pictures", 144 * 16 * 64 * 64 * 4, "always")


def test_operations_follow_the_options(sd35: Any) -> None:
    def flops(*overrides: str) -> dict[str, float]:
        return epoch_flops(sd35, load_config("sd35-medium", ["loss.center=false", *overrides]))

    base, forward = flops(), sd35.forward_flops
    assert base["sampling"] == 1152 * 25 * forward
    assert base["training"] == pytest.approx(1152 * 24 * (3 + BACKWARD + 1) * forward)
    assert base["refreshes, on average"] == pytest.approx(1152 * 24 * (BACKWARD + 1) * forward / 10)
    assert flops("loss.kl_weight=0")["training"] == pytest.approx(1152 * 24 * (2 + BACKWARD + 1) * forward)
    assert flops("loss.center=true")["refreshes, on average"] == 0
    assert flops("balance.collector=passes")["refreshes, on average"] == pytest.approx(
        4 * base["refreshes, on average"]
    )
    assert flops("balance.method=mgda")["refreshes, on average"] == pytest.approx(10 * base["refreshes, on average"])
    assert flops("sampling.guidance_scale=2")["sampling"] == 2 * base["sampling"]
    assert seconds(sum(base.values()), "H100", 16) == pytest.approx(seconds(sum(base.values()), "H100") / 16)


def test_tables(sd35: Any, paper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpu", "H100", "--gpus", "8", "run.epochs=10"])
    table = capsys.readouterr().out
    for words in ("each of 8 processes", "device memory, GiB", "rows of 5 objectives", "8 x H100 at 40%", "10 epochs"):
        assert words in table
    assert " min" not in estimate_table(sd35, paper)
    with pytest.raises(SystemExit):
        main(["optimizer.lrr=1"])
    assert "Did you mean" in capsys.readouterr().err
