"""The network of ImageReward, made of transformers' BLIP models."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BlipTextModel, BlipVisionModel

from gradbalance.errors import InvalidArgumentError

from .blip_keys import HEAD, TEXT, VISION, blip_configs, to_transformers

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""What the published model subtracts from its raw score, and divides the difference by."""


class ImageRewardModel(nn.Module):
    """A BLIP whose text encoder looks at the picture, and five linear layers on its first token.

    Attributes:
        image_size: Height and width of the pictures it takes.
        vocabulary: Number of tokens it knows.
    """

    def __init__(self, vision: BlipVisionModel, text: BlipTextModel, head: nn.Sequential) -> None:
        super().__init__()
        self.vision, self.text, self.head = vision, text, head
        size = vision.config.image_size
        self.image_size = size if isinstance(size, int) else size[0]
        self.vocabulary: int = text.config.vocab_size

    def forward(self, pixels: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Standardized scores ``[B]`` of normalized pictures ``[B, 3, image_size, image_size]`` for B texts."""
        pictures = self.vision(pixel_values=pixels.to(self.vision.dtype)).last_hidden_state
        states = self.text(
            input_ids=input_ids, attention_mask=attention_mask, encoder_hidden_states=pictures, is_decoder=False
        ).last_hidden_state
        raw: Tensor = self.head(states[:, 0].to(self.head[0].weight.dtype))
        return (raw[:, 0] - MEAN) / STD

    @classmethod
    def from_state(
        cls, state: dict[str, Tensor], file: Path, *, vision_heads: int, text_heads: int, dtype: torch.dtype
    ) -> ImageRewardModel:
        """The model with the tensors of a checkpoint; ``dtype`` is that of BLIP, the head's is float32 or its own.

        Raises:
            InvalidArgumentError: Tensors are missing, unknown or of shapes that do not fit each other.
        """
        tensors = to_transformers(state, file)
        vision_config, text_config = blip_configs(state, vision_heads=vision_heads, text_heads=text_heads)
        try:
            vision = BlipVisionModel.from_pretrained(
                None, config=vision_config, state_dict=tensors[VISION], dtype=dtype
            )
            text = BlipTextModel.from_pretrained(
                None, config=text_config, state_dict=tensors[TEXT], dtype=dtype, add_pooling_layer=False
            )
            head = _linear_layers(tensors[HEAD], text_config.hidden_size)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"`path` must hold an ImageReward whose tensors fit each other. Found {str(file)!r}: {error}"
            ) from error
        return cls(vision, text, head)


def _linear_layers(tensors: dict[str, Tensor], width: int) -> nn.Sequential:
    """Linear layers one after the other, from ``width`` features to one number."""
    rows = [len(tensors[f"{i}.bias"]) for i in range(len(tensors) // 2)]
    dtype = torch.promote_types(tensors["0.weight"].dtype, torch.float32)
    pairs = zip([width, *rows[:-1]], [*rows[:-1], 1], strict=True)
    head = nn.Sequential(*(nn.Linear(inputs, outputs, dtype=dtype) for inputs, outputs in pairs))
    head.load_state_dict(tensors)
    return head
