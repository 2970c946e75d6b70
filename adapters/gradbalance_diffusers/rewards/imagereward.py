"""ImageReward: human preference for a picture given its prompt."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.batches import check_batch_size, in_batches
from gradbalance_diffusers.rewards.imagereward_model import ImageRewardModel
from gradbalance_diffusers.rewards.images import resized_with_pil
from gradbalance_diffusers.rewards.models import load_tokenizer, resolve_device, resolve_dtype, shared
from gradbalance_diffusers.rewards.weights import find_file, read_weights

CHECKPOINT = "ImageReward.pt"
"""Name of the weight file in the hub repository, or in a folder."""
TOKENS = 35
"""Tokens that a prompt is padded or cut to, with the first and the last."""


class ImageReward:
    r"""ImageReward-v1.0 (Xu et al. 2023, arXiv 2304.05977).

    $$R = (h(z) - \mu) / \sigma$$

    where z is the first token's output of a BLIP whose text encoder attends to the picture (ViT-L/16, BERT-base), h
    five linear layers without activation between them, and $\mu$ = 0.167, $\sigma$ = 1.033 constants of the published
    code that standardize the score. Typical values are -2 to 2. Each picture is scored for its own prompt only.

    The checkpoint is mapped tensor by tensor to transformers' BLIP (see
    :mod:`gradbalance_diffusers.rewards.blip_keys`); the package image-reward is not needed. Pictures are prepared by
    CLIP's own steps on 8-bit pixels. Prompts are cut to 35 tokens and begin with [CLS], as in the published code.

    Args:
        path: The weight file; or a folder or hub id that has `CHECKPOINT`.
        tokenizer: Folder or hub id of BERT's uncased tokenizer.
        vision_heads: Attention heads of the image encoder, which the weights do not tell. ViT-L/16: 16.
        text_heads: Attention heads of the text encoder. BERT-base: 12.
        revision: Branch, tag or commit of ``path`` on the hub. None: its main branch.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for BLIP; the linear layers compute in float32.
        device: Such as ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures scored at once.

    Raises:
        InvalidArgumentError: Weights or a tokenizer that cannot be loaded, or options that do not fit.
    """

    name = "imagereward"

    def __init__(
        self,
        path: str | Path = "THUDM/ImageReward",
        *,
        tokenizer: str | Path = "google-bert/bert-base-uncased",
        vision_heads: int = 16,
        text_heads: int = 12,
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        place, number = resolve_device(device), resolve_dtype(dtype)
        file = find_file(path, CHECKPOINT, revision=revision).resolve()
        self._tokenizer = load_tokenizer(tokenizer)

        def load() -> ImageRewardModel:
            return ImageRewardModel.from_state(
                read_weights(file), file, vision_heads=vision_heads, text_heads=text_heads, dtype=number
            )

        self._device = place
        self._model = shared(("ImageReward", str(file), vision_heads, text_heads, number, place), place, load)
        first, size = self._tokenizer("a").input_ids[0], len(self._tokenizer)
        if size > self._model.vocabulary or first != self._tokenizer.cls_token_id:
            raise InvalidArgumentError(
                f"`tokenizer` must be that of BERT, uncased: texts begin with [CLS], and there are at most the "
                f"{self._model.vocabulary} tokens of the model. Found {str(tokenizer)!r} with {size} tokens, whose "
                f"texts begin with {self._tokenizer.convert_ids_to_tokens(first)!r}."
            )

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], for their prompts; metadata is not looked at."""
        return in_batches(self._score, images, prompts, self._batch_size)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        texts = self._tokenizer(prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        pixels = resized_with_pil(images, self._model.image_size)
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            scores: Tensor = self._model(
                pixels.to(self._device), texts.input_ids.to(self._device), texts.attention_mask.to(self._device)
            )
        return scores
