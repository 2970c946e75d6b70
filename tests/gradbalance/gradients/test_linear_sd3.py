"""Rows of an SD3 transformer with LoRA: the `linear` collector against K passes."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gradbalance.affine import AffineLoss
from gradbalance.gradients.collect import choose
from gradbalance.gradients.graph import explore
from gradbalance.gradients.linear import collect_linear
from gradbalance.gradients.losses import as_objectives
from gradbalance.gradients.passes import collect_by_passes
from gradbalance.gradients.record import record, resumed
from gradbalance.gradients.rows import Rows

pytest.importorskip("diffusers")
pytest.importorskip("peft")

BATCH = 3


def make_transformer(dtype: torch.dtype) -> nn.Module:
    from diffusers import SD3Transformer2DModel
    from peft import LoraConfig

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
    )
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(
            r=3,
            lora_alpha=6,
            init_lora_weights=False,
            target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"],
        )
    )
    return model.to(dtype).train()


def predict(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    output: Tensor = model(
        hidden_states=normal(BATCH, 4, 8, 8),
        encoder_hidden_states=normal(BATCH, 5, 12),
        pooled_projections=normal(BATCH, 10),
        timestep=torch.tensor([100.0, 500.0, 900.0], dtype=dtype),
    ).sample
    return output


@pytest.fixture(params=[False, True], ids=["plain", "checkpointed"])
def checkpointed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # diffusers calls a constructor that torch 2.13 deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        yield


def rows_of(model: nn.Module, make: Callable[[Tensor], AffineLoss], collector: str, autocast: bool = False) -> Rows:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), record(model):
        output = predict(model)
    loss = make(output.float() if autocast else output)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    objectives, rows = as_objectives(loss), Rows(parameters, 4)
    graph = explore(objectives.roots)
    assert choose(objectives, parameters, graph, "auto").collector == "linear"
    if collector == "linear":
        collect_linear(loss, rows, graph)
    else:
        with resumed(graph.recordings):
            collect_by_passes(objectives, rows)
    return rows


def flat(rows: Rows) -> Tensor:
    return torch.cat(rows.blocks, 1).double()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("center", [False, True])
def test_rows_equal_passes(
    dtype: torch.dtype, tolerance: float, center: bool, checkpointed: bool, nft_loss: Callable[..., AffineLoss]
) -> None:
    model = make_transformer(dtype)
    if checkpointed:
        model.enable_gradient_checkpointing()

    def loss(output: Tensor) -> AffineLoss:
        return nft_loss(output, center=center)

    found, expected = (flat(rows_of(model, loss, collector)) for collector in ("linear", "passes"))
    assert relative(found, expected) < tolerance


def per_sample_rows(model: nn.Module, make: Callable[[Tensor], AffineLoss]) -> Tensor:
    """M x B ordinary backward passes with one-hot cotangents, contracted in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        output = predict(model)
    loss = make(output.float())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = torch.zeros(4, sum(parameter.numel() for parameter in parameters))
    for m in range(2):
        for i in range(BATCH):
            gradients = torch.autograd.grad(loss.terms[m, i], parameters, retain_graph=True)
            rows += loss.coefficients[:, m, i, None] * torch.cat([g.flatten() for g in gradients]).float()
    return rows.double()


@pytest.mark.usefixtures("quiet")
def test_rows_under_autocast(checkpointed: bool, nft_loss: Callable[..., AffineLoss]) -> None:
    model = make_transformer(torch.float32)
    if checkpointed:
        model.enable_gradient_checkpointing()
    found = flat(rows_of(model, nft_loss, "linear", autocast=True))
    passes = flat(rows_of(model, nft_loss, "passes", autocast=True))
    reference = per_sample_rows(model, nft_loss)
    assert relative(found, reference) < 1e-5
    # `passes` rounds whole rows to bf16, once per row.
    assert relative(found, passes) < 2**-7


def relative(found: Tensor, expected: Tensor) -> float:
    assert expected.norm(dim=1).min() > 0
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.usefixtures("quiet")
def test_checkpointing_recomputes_recorded_layers(nft_loss: Callable[..., AffineLoss]) -> None:
    """Guards the tests above: with checkpointing on, layers do run again during the backward."""
    model = make_transformer(torch.float32)
    model.enable_gradient_checkpointing()
    calls = []
    layer = next(m for name, m in model.named_modules() if name.endswith("to_q.lora_A.default"))
    layer.register_forward_hook(lambda *_: calls.append(None))
    rows_of(model, nft_loss, "linear")
    assert len(calls) == 1 + 2  # the forward, and one recomputation per term
