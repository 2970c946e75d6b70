"""CLIP as rewards use it: unit-norm image and text features."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPModel, PreTrainedTokenizerBase

from gradbalance.errors import InvalidArgumentError

_LEGACY_EOS = 2  # with this id transformers pools at the highest token id of the text instead


class CLIP:
    """A CLIP model with its tokenizer; safe to call from several threads.

    Features are computed in the dtype of the model, without gradients and outside any autocast, and come back in
    float32 with norm 1. They are inference tensors on `device`.

    Args:
        model: Frozen, in evaluation mode.
        tokenizer: Its tokenizer.

    Attributes:
        device: Where the model is.
        image_size: Height and width of the images it takes.
        dimension: Length D of the features.
        logit_scale: Factor exp(t) of the cosine in the model's logits.

    Raises:
        InvalidArgumentError: The tokenizer does not belong to the model.
    """

    def __init__(self, model: CLIPModel, tokenizer: PreTrainedTokenizerBase) -> None:
        _check_fit(model, tokenizer)
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # a fast tokenizer keeps the padding and truncation of a call as state
        self.device = model.logit_scale.device
        config: Any = model.config  # the type of its parts is loose
        self._length: int = config.text_config.max_position_embeddings
        self.image_size: int = config.vision_config.image_size
        self.dimension: int = config.projection_dim
        self.logit_scale = model.logit_scale.exp().item()

    def image_features(self, pixels: Tensor) -> Tensor:
        """Unit-norm features ``[B, D]`` of normalized pixels ``[B, 3, image_size, image_size]``."""
        with _plain_inference(self.device):
            features = _tensor(self._model.get_image_features(pixel_values=pixels.to(self.device, self._model.dtype)))
            return torch.nn.functional.normalize(features.float(), dim=-1)

    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Unit-norm features ``[B, D]`` of B texts; equal texts are encoded once.

        A text is padded or cut to the model's number of tokens (77), start and end token included. Padding follows the
        end token, at which the model pools, and attention is causal: it changes nothing.
        """
        distinct = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        with _plain_inference(self.device):
            features = _tensor(self._model.get_text_features(input_ids=self._tokens(list(distinct)).to(self.device)))
            rows = torch.tensor([distinct[text] for text in texts], device=self.device)
            return torch.nn.functional.normalize(features.float(), dim=-1)[rows]

    def cosines(self, pixels: Tensor, texts: Sequence[str]) -> Tensor:
        """Cosine ``[B]`` of each image with its own text; see `image_features` and `text_features`."""
        return (self.image_features(pixels) * self.text_features(texts)).sum(dim=-1)

    def _tokens(self, texts: list[str]) -> Tensor:
        with self._lock:
            encoded = self._tokenizer(
                texts, padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
            )
        ids: Tensor = encoded.input_ids
        return ids


@contextmanager
def _plain_inference(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


def _tensor(output: Any) -> Tensor:
    """The projected features: the output itself before transformers 5, its ``pooler_output`` since."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features


def _check_fit(model: CLIPModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The model pools at the end token; looked for under a wrong id, it would silently take another position."""
    config: Any = model.config.text_config
    size, end = len(tokenizer), tokenizer.eos_token_id
    pooled = size - 1 if config.eos_token_id == _LEGACY_EOS else config.eos_token_id
    if size > config.vocab_size or end != pooled:
        raise InvalidArgumentError(
            f"`tokenizer` must be the one the CLIP model was trained with: at most {config.vocab_size} tokens, the end "
            f"token with id {pooled}. Found {size} tokens, the end token with id {end}."
        )
