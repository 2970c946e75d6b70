from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers import generator
from gradbalance_diffusers.embeddings import PromptEmbeddings, PromptEncoder, encode_prompts
from gradbalance_diffusers.policy import SD3Policy


@pytest.fixture
def counted(policy: SD3Policy, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The prompts of every run of the text encoders."""
    calls: list[list[str]] = []
    original = policy.pipeline.encode_prompt

    def encode(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["prompt"])
        return original(*args, **kwargs)

    monkeypatch.setattr(policy.pipeline, "encode_prompt", encode)
    return calls


def test_each_distinct_prompt_is_encoded_once(policy: SD3Policy, counted: list[list[str]]) -> None:
    encoder = PromptEncoder(policy)
    encoder.encode(["a", "b", "a"])
    encoder.encode(["b", "c"])
    assert counted == [["a"], ["b"], ["c"]]


def test_misses_are_encoded_in_batches(policy: SD3Policy, counted: list[list[str]]) -> None:
    encoder = PromptEncoder(policy, batch_size=2)
    encoder.encode(["a", "b", "c", "a"])
    assert counted == [["a", "b"], ["c"]]


def test_samples_of_one_prompt_share_its_embeddings(policy: SD3Policy) -> None:
    encoder = PromptEncoder(policy)
    prompts = ["b", "a", "b", "b", "c"]
    shared, repeated = encoder.encode_samples(prompts), encoder.encode(prompts)
    assert (len(shared), len(shared.distinct)) == (5, 3)
    for idx in (torch.tensor([4, 1, 0, 2]), [3], slice(1, 4)):
        assert torch.equal(shared.index(idx).prompt_embeds, repeated.index(idx).prompt_embeds)
        assert torch.equal(shared.index(idx).pooled, repeated.index(idx).pooled)
    with pytest.raises(InvalidArgumentError, match="prompts"):
        encoder.encode_samples([])


def test_order_and_repeats(policy: SD3Policy) -> None:
    found = PromptEncoder(policy, batch_size=3).encode(["b", "a", "b"])
    expected = encode_prompts(policy, ["b", "a", "b"])
    torch.testing.assert_close(found.prompt_embeds, expected.prompt_embeds)
    torch.testing.assert_close(found.pooled, expected.pooled)
    assert not torch.allclose(found.pooled[0], found.pooled[1])


def test_bits_do_not_depend_on_what_was_encoded_before(policy: SD3Policy) -> None:
    prompts = [f"picture {i}" for i in range(7)]
    together = PromptEncoder(policy).encode(prompts)
    alone = PromptEncoder(policy).encode(prompts[3:4])
    assert torch.equal(together.prompt_embeds[3], alone.prompt_embeds[0])
    assert torch.equal(together.pooled[3], alone.pooled[0])


def test_without_t5_the_place_of_its_tokens_is_zero(load_policy: Callable[..., SD3Policy]) -> None:
    embeddings = PromptEncoder(load_policy(max_sequence_length=5)).encode(["a b"])
    assert embeddings.prompt_embeds.shape == (1, 12 + 5, 32)
    assert not embeddings.prompt_embeds[:, 12:].any()
    assert embeddings.prompt_embeds[:, :12].any()


def test_with_t5_its_tokens_follow(t5_pipeline_path: Path) -> None:
    policy = SD3Policy(generator.load_pipeline(t5_pipeline_path), rank=2, max_sequence_length=5)
    embeddings = PromptEncoder(policy).encode(["a b"])
    assert embeddings.prompt_embeds.shape == (1, 12 + 5, 32)
    assert embeddings.prompt_embeds[:, 12:].any()


def test_dtype_is_kept(pipeline_path: Path) -> None:
    pipeline = generator.load_pipeline(pipeline_path, torch_dtype=torch.bfloat16)
    policy = SD3Policy(pipeline, rank=2, max_sequence_length=0)
    assert PromptEncoder(policy).encode(["a"]).prompt_embeds.dtype == torch.bfloat16


def test_offloaded_encoders_come_back_for_a_new_prompt_only(policy: SD3Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PromptEncoder(policy)
    before = encoder.encode(["a"])
    moves: list[str] = []
    monkeypatch.setattr(policy.pipeline.text_encoder, "to", lambda device: moves.append(str(device)))
    encoder.offload()
    encoder.encode(["a"])
    assert moves == ["cpu"]
    after = encoder.encode(["b", "a"])
    assert moves == ["cpu", str(policy.device), "cpu"]
    assert torch.equal(after.pooled[1], before.pooled[0])


def test_limit_forgets_the_least_recently_used(policy: SD3Policy, counted: list[list[str]]) -> None:
    encoder = PromptEncoder(policy, limit=2)
    first = encoder.encode(["a"])
    encoder.encode(["b"])
    encoder.encode(["a"])
    encoder.encode(["c"])
    assert counted == [["a"], ["b"], ["c"]]
    encoder.encode(["a", "c"])
    assert counted == [["a"], ["b"], ["c"]]
    encoder.encode(["b"])
    assert counted[3:] == [["b"]]
    many = encoder.encode(["d", "e", "f", "a"])
    assert (len(many), len(encoder)) == (4, 2)
    assert torch.equal(many.pooled[3], first.pooled[0]), "a prompt that was forgotten is encoded to the same bits"


def test_dropped_encoders_leave_the_embeddings(policy: SD3Policy) -> None:
    kept, encoder = PromptEncoder(policy).encode(["b", "a"]), PromptEncoder(policy, limit=1)
    encoder.drop(["a", "b", "a"])
    assert torch.equal(encoder.encode(["b", "a"]).prompt_embeds, kept.prompt_embeds)
    assert policy.pipeline.text_encoder is None
    assert policy.pipeline.text_encoder_2 is None
    with pytest.raises(StateError, match=r"dropped after 2 prompts.*'c'.*text_encoders: offload"):
        encoder.encode(["a", "c"])


def test_index_and_to() -> None:
    embeddings = PromptEmbeddings(torch.randn(3, 2, 4), torch.randn(3, 5))
    picked = embeddings.index(torch.tensor([2, 0, 2]))
    assert torch.equal(picked.pooled, embeddings.pooled[[2, 0, 2]])
    assert torch.equal(picked.prompt_embeds, embeddings.prompt_embeds[[2, 0, 2]])
    assert len(embeddings.index(slice(1, None))) == 2
    assert embeddings.to("cpu").pooled.dtype == torch.float32
    assert embeddings.to("cpu", torch.bfloat16).pooled.dtype == torch.bfloat16


def test_bad_shapes() -> None:
    with pytest.raises(InvalidArgumentError, match="same B"):
        PromptEmbeddings(torch.randn(3, 2, 4), torch.randn(2, 5))


def test_bad_arguments(policy: SD3Policy) -> None:
    with pytest.raises(InvalidArgumentError, match="prompts"):
        PromptEncoder(policy).encode([])
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        PromptEncoder(policy, batch_size=0)
    with pytest.raises(InvalidArgumentError, match="limit"):
        PromptEncoder(policy, limit=0)


def test_pipeline_without_text_encoders(policy: SD3Policy) -> None:
    policy.pipeline.text_encoder = None
    with pytest.raises(InvalidArgumentError, match="CLIP"):
        PromptEncoder(policy).encode(["a"])
