"""HPSv2.1: human preference for a picture given its prompt."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPModel

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.batches import check_batch_size, in_batches
from gradbalance_diffusers.rewards.clip import CLIP
from gradbalance_diffusers.rewards.images import padded
from gradbalance_diffusers.rewards.models import load_tokenizer, resolve_device, resolve_dtype, shared
from gradbalance_diffusers.rewards.open_clip_keys import clip_config, to_transformers
from gradbalance_diffusers.rewards.weights import find_file, read_weights

CHECKPOINT = "HPS_v2.1_compressed.pt"
"""Name of the weight file in the hub repository, or in a folder."""


class HPSv2:
    r"""Human Preference Score v2.1 (Wu et al. 2023, arXiv 2306.09341).

    $$R = \cos(f(x), g(c))$$

    with the image features f and text features g of a CLIP ViT-H/14 fine-tuned on rankings by people. Its checkpoint is
    in the layout of open_clip and is mapped tensor by tensor to transformers' ``CLIPModel`` (see
    :mod:`gradbalance_diffusers.rewards.open_clip_keys`); no other weights are needed. Pictures are resized in floating
    point by the bicubic filter, longest side first, and padded to a square with black. Prompts are cut to 77 tokens;
    open_clip's tokenizer also repairs broken encodings and undoes HTML escapes, which the tokenizer here does not.
    Typical values are 0.2 to 0.4.

    Args:
        path: The weight file; or a folder or hub id that has `CHECKPOINT`.
        tokenizer: Folder or hub id of CLIP's tokenizer, whose end token must have the highest id.
        vision_heads: Attention heads of the vision tower, which the weights do not tell. ViT-H/14: 16.
        text_heads: Attention heads of the text tower. ViT-H/14: 16.
        revision: Branch, tag or commit of ``path`` on the hub. None: its main branch.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: Such as ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures scored at once.

    Raises:
        InvalidArgumentError: Weights or a tokenizer that cannot be loaded, or options that do not fit.
    """

    name = "hpsv2"

    def __init__(
        self,
        path: str | Path = "xswu/HPSv2",
        *,
        tokenizer: str | Path = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        vision_heads: int = 16,
        text_heads: int = 16,
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        place, number = resolve_device(device), resolve_dtype(dtype)
        file = find_file(path, CHECKPOINT, revision=revision).resolve()
        texts = load_tokenizer(tokenizer)
        if texts.eos_token_id != len(texts) - 1:
            raise InvalidArgumentError(
                "`tokenizer` must give the end token the highest id, where the text is pooled. Found "
                f"{str(tokenizer)!r} with the id {texts.eos_token_id} of {len(texts)}."
            )

        def load() -> CLIPModel:
            state = read_weights(file)
            tensors = to_transformers(state, file)
            config = clip_config(
                state, vision_heads=vision_heads, text_heads=text_heads, eos_token_id=texts.eos_token_id
            )
            return CLIPModel.from_pretrained(None, config=config, state_dict=tensors, dtype=number)

        key = ("HPSv2", str(file), vision_heads, text_heads, texts.eos_token_id, number, place)
        self._clip = CLIP(shared(key, place, load), texts)

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float]:
        """Scores pictures, float (B, 3, H, W) in [0, 1], for their prompts; metadata is not looked at."""
        return in_batches(self._score, images, prompts, self._batch_size)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self._clip.cosines(padded(images.to(self._clip.device), self._clip.image_size), prompts)
