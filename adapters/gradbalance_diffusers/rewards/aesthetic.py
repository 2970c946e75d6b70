"""Aesthetic score: how much people would like a picture, whatever its prompt."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.batches import check_batch_size, in_batches
from gradbalance_diffusers.rewards.images import resized_with_pil
from gradbalance_diffusers.rewards.models import load_clip
from gradbalance_diffusers.rewards.weights import check_keys, find_file, read_weights

HEAD = "aesthetic-model.pth"
"""Name of the predictor's file in the hub repository, or in a folder."""
LAYERS = ("layers.0", "layers.2", "layers.4", "layers.6", "layers.7")
"""Its linear layers; those between are dropout, which does nothing after training."""


class Aesthetic:
    r"""LAION's improved aesthetic predictor (Schuhmann 2022), trained to predict ratings from 1 to 10.

    $$R = W_5(W_4(W_3(W_2(W_1 f(x) + b_1) + b_2) + b_3) + b_4) + b_5$$

    with unit-norm image features f(x) of CLIP ViT-L/14 and layers of 768, 1024, 128, 64, 16 and 1 units, with no
    activation between them. Pictures are prepared by CLIP's own steps on 8-bit pixels. Typical values are 4 to 7; they
    are not bounded.

    Args:
        path: Folder or hub id of the CLIP model.
        head: The predictor's weight file, published as ``sac+logos+ava1-l14-linearMSE.pth``; or a folder or hub id that
            has it as `HEAD`.
        revision: Branch, tag or commit of ``path`` on the hub. None: its main branch.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for CLIP; the predictor computes in float32.
        device: Such as ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures scored at once.

    Raises:
        InvalidArgumentError: Weights that cannot be loaded or do not fit each other, or options that do not fit.
    """

    name = "aesthetic"

    def __init__(
        self,
        path: str | Path = "openai/clip-vit-large-patch14",
        *,
        head: str | Path = "trl-lib/ddpo-aesthetic-predictor",
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        layers = _read_head(find_file(head, HEAD, parameter="head"))
        self._clip = load_clip(path, revision=revision, dtype=dtype, device=device)
        width = layers[0][0].shape[1]
        if width != self._clip.dimension:
            raise InvalidArgumentError(
                f"`head` must take the {self._clip.dimension} features of the CLIP model {str(path)!r}. Found "
                f"{str(head)!r}, which takes {width}."
            )
        self._layers = [(weight.to(self._clip.device), bias.to(self._clip.device)) for weight, bias in layers]

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> list[float]:
        """Scores pictures, float (B, 3, H, W) in [0, 1]; prompts and metadata are not looked at."""
        return in_batches(self._score, images, prompts, self._batch_size)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        hidden = self._clip.image_features(resized_with_pil(images, self._clip.image_size))
        for weight, bias in self._layers:
            hidden = linear(hidden, weight, bias)
        return hidden[:, 0]


def _read_head(file: Path) -> list[tuple[Tensor, Tensor]]:
    tensors = read_weights(file, parameter="head")
    expected = {f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")}
    check_keys(set(tensors), expected, file=file, layout="the aesthetic predictor", parameter="head")
    layers = [(tensors[f"{layer}.weight"].float(), tensors[f"{layer}.bias"].float()) for layer in LAYERS]
    shapes = [tuple(weight.shape) for weight, _ in layers]
    if [shape[0] for shape in shapes] != [*(shape[1] for shape in shapes[1:]), 1]:
        raise InvalidArgumentError(
            "`head` must hold linear layers that fit each other and end in one number. Found weights of the shapes "
            f"{shapes} in {str(file)!r}."
        )
    return layers
