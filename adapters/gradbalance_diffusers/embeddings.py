"""Prompt embeddings: computed once per distinct prompt, kept on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradbalance.errors import InvalidArgumentError, StateError

from .progress import progress_bar

if TYPE_CHECKING:
    from .generator import SD3Generator


@dataclass(frozen=True)
class PromptEmbeddings:
    """What the SD3 transformer is conditioned on, for B prompts.

    Attributes:
        prompt_embeds: ``[B, L, D]`` token embeddings (CLIP tokens, then T5 tokens or their zero placeholders).
        pooled: ``[B, P]`` pooled CLIP embeddings.

    >>> e = PromptEmbeddings(torch.zeros(3, 4, 8), torch.arange(6.0).view(3, 2))
    >>> len(e.index([2, 0])), e.index([2, 0]).pooled.tolist()
    (2, [[4.0, 5.0], [0.0, 1.0]])
    """

    prompt_embeds: Tensor
    pooled: Tensor

    def __post_init__(self) -> None:
        if self.prompt_embeds.dim() != 3 or self.pooled.dim() != 2 or len(self.prompt_embeds) != len(self.pooled):
            raise InvalidArgumentError(
                "`prompt_embeds` must be [B, L, D] and `pooled` [B, P] with the same B. Found "
                f"{tuple(self.prompt_embeds.shape)} and {tuple(self.pooled.shape)}."
            )

    def __len__(self) -> int:
        return len(self.pooled)

    def index(self, idx: Tensor | Sequence[int] | slice) -> PromptEmbeddings:
        """The embeddings of the samples ``idx`` (repeats allowed), in that order."""
        if not isinstance(idx, slice):
            idx = torch.as_tensor(idx, dtype=torch.long, device=self.pooled.device)
        return PromptEmbeddings(self.prompt_embeds[idx], self.pooled[idx])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PromptEmbeddings:
        """The same embeddings on ``device``, cast to ``dtype`` if one is given."""
        return PromptEmbeddings(
            self.prompt_embeds.to(device=device, dtype=dtype), self.pooled.to(device=device, dtype=dtype)
        )


@dataclass(frozen=True)
class SampleEmbeddings:
    """Embeddings of B samples, with those of each distinct prompt kept once.

    Repeated for every sample of an SD3.5 epoch they would be 2 GB (1152 samples x 205 tokens x 4096 x 2 bytes).

    Attributes:
        distinct: Embeddings of the distinct prompts.
        rows: ``[B]`` int64 on the CPU, the row of each sample in ``distinct``.

    >>> distinct = PromptEmbeddings(torch.zeros(2, 4, 8), torch.arange(4.0).view(2, 2))
    >>> SampleEmbeddings(distinct, torch.tensor([0, 0, 1])).index([2, 0]).pooled.tolist()
    [[2.0, 3.0], [0.0, 1.0]]
    """

    distinct: PromptEmbeddings
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, idx: Tensor | Sequence[int] | slice) -> PromptEmbeddings:
        """The embeddings of the samples ``idx`` (repeats allowed), in that order."""
        return self.distinct.index(self.rows[idx])


@torch.no_grad()
def encode_prompts(policy: SD3Generator, prompts: Sequence[str]) -> PromptEmbeddings:
    """Run the text encoders of the policy's pipeline on ``prompts``, where the encoders are.

    A pipeline without a T5 encoder gets zeros in place of its tokens, ``policy.max_sequence_length`` of them.

    Raises:
        InvalidArgumentError: No prompts, or a pipeline without CLIP text encoders.
    """
    if not prompts:
        raise InvalidArgumentError("`prompts` must not be empty. Found no prompt.")
    pipeline = policy.pipeline
    if pipeline.text_encoder is None or pipeline.text_encoder_2 is None:
        raise InvalidArgumentError(
            "The pipeline must have both CLIP text encoders to encode prompts. Found none. "
            "Load the whole pipeline, or build PromptEmbeddings yourself."
        )
    texts = list(prompts)
    prompt_embeds, _, pooled, _ = pipeline.encode_prompt(
        prompt=texts,
        prompt_2=texts,
        prompt_3=texts,
        device=pipeline.text_encoder.device,
        do_classifier_free_guidance=False,
        max_sequence_length=policy.max_sequence_length,
    )
    return PromptEmbeddings(prompt_embeds, pooled)


class PromptEncoder:
    """A cache of prompt embeddings: a distinct prompt is encoded once and stays on the CPU in its own dtype.

    An SD3.5 embedding of 205 tokens is 1.7 MB in bfloat16: 100,000 prompts would be 170 GB, the 48 of an epoch are
    80 MB. Hence the limit, and encoders that wait on the CPU in between (:meth:`offload`) or, for a run with few
    prompts, are given up once all of them are encoded (:meth:`drop`).

    Args:
        policy: Whose text encoders are used.
        batch_size: Prompts per run of the text encoders. With 1 (the default) an embedding does not depend on which
            other prompts were new at the time, so a resumed run sees the very same bits as an unbroken one. More is
            faster, and equal only up to rounding.
        limit: Most prompts to keep, the least recently used make room; None keeps all.
    """

    def __init__(self, policy: SD3Generator, *, batch_size: int = 1, limit: int | None = None) -> None:
        if batch_size < 1 or (limit is not None and limit < 1):
            raise InvalidArgumentError(
                f"`batch_size` must be at least 1, and `limit` too or None. Found {batch_size} and {limit}."
            )
        self.policy = policy
        self.batch_size = batch_size
        self.limit = limit
        self._cache: dict[str, PromptEmbeddings] = {}  # the least recently used first
        self._offloaded = self._dropped = False

    def __len__(self) -> int:
        return len(self._cache)

    def encode(self, prompts: Sequence[str]) -> PromptEmbeddings:
        """Embeddings of ``prompts`` (repeats allowed) on the CPU, in order.

        Raises:
            InvalidArgumentError: No prompts.
            StateError: A prompt that is not in the cache, after :meth:`drop`.
        """
        if not prompts:
            raise InvalidArgumentError("`prompts` must not be empty. Found no prompt.")
        distinct = list(dict.fromkeys(prompts))
        if missing := [text for text in distinct if text not in self._cache]:
            self._encode_missing(missing)
        for text in distinct:
            self._cache[text] = self._cache.pop(text)
        rows = [self._cache[text] for text in prompts]
        for text in list(self._cache)[: max(0, len(self) - (self.limit or len(self)))]:
            del self._cache[text]
        return PromptEmbeddings(torch.cat([r.prompt_embeds for r in rows]), torch.cat([r.pooled for r in rows]))

    def encode_samples(self, prompts: Sequence[str]) -> SampleEmbeddings:
        """Embeddings of one prompt per sample; memory grows with the number of distinct prompts only.

        Raises:
            InvalidArgumentError: No prompts.
        """
        order = {text: row for row, text in enumerate(dict.fromkeys(prompts))}
        rows = torch.tensor([order[text] for text in prompts], dtype=torch.int64)
        return SampleEmbeddings(self.encode(list(order)), rows)

    def offload(self) -> None:
        """Keep the text encoders on the CPU from now on; an unseen prompt brings them back while it needs them."""
        self._offloaded = True
        self._move("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def drop(self, prompts: Sequence[str]) -> None:
        """Encode ``prompts``, all that will ever be asked for, and give up the text encoders and their memory."""
        self.limit = None
        if missing := [text for text in dict.fromkeys(prompts) if text not in self._cache]:
            self._encode_missing(missing)
        self._move("cpu")  # whoever else holds one of them no longer holds memory of the device
        pipeline = self.policy.pipeline
        pipeline.text_encoder = pipeline.text_encoder_2 = pipeline.text_encoder_3 = None
        self._dropped = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _encode_missing(self, missing: Sequence[str]) -> None:
        if self._dropped:
            raise StateError(
                f"The text encoders were dropped after {len(self)} prompts were encoded. Found the new prompt "
                f"{missing[0]!r}. Keep them with `model.text_encoders: offload`."
            )
        if self._offloaded:
            self._move(self.policy.device)
        chunks = range(0, len(missing), self.batch_size)
        try:
            for start in progress_bar(chunks, desc="encoding prompts", leave=False, disable=len(chunks) < 100):
                chunk = missing[start : start + self.batch_size]
                embeddings = encode_prompts(self.policy, chunk).to("cpu")
                for i, text in enumerate(chunk):
                    self._cache[text] = embeddings.index([i])
        finally:
            if self._offloaded:
                self.offload()

    def _move(self, device: torch.device | str) -> None:
        pipeline = self.policy.pipeline
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
            if isinstance(encoder, nn.Module):
                encoder.to(device)
