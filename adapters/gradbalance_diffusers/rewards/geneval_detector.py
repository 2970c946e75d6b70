"""Finds the objects on a picture with Mask2Former, for GenEval."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

from gradbalance.errors import InvalidArgumentError

from .batches import check_batch_size
from .geneval_request import CLASSES
from .geneval_rules import THRESHOLD, Detection
from .models import cannot_load, load_model


class Mask2FormerDetector:
    """Instances of the 80 classes of COCO, by Mask2Former (Cheng et al. 2022, arXiv 2112.01527).

    GenEval takes the same architecture, Swin-S, from mmdetection. The checkpoint of transformers stems from another
    training run and sees a picture at another size (that of its own preprocessor configuration), so single verdicts can
    differ from GenEval's.

    Args:
        path: Folder or hub id of a ``Mask2FormerForUniversalSegmentation`` with 80 labels in COCO's order and of its
            preprocessor configuration.
        revision: Branch, tag or commit on the hub. None: its main branch.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: Such as ``"cuda:1"``. None: the current CUDA device, or the CPU where there is none.
        batch_size: Pictures the model sees at once.

    Raises:
        InvalidArgumentError: A model that cannot be loaded or has other labels, or options that do not fit.
    """

    def __init__(
        self,
        path: str | Path = "facebook/mask2former-swin-small-coco-instance",
        *,
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 8,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        self._model = load_model(
            Mask2FormerForUniversalSegmentation,
            path,
            revision=revision,
            dtype=dtype,
            device=device,
            parameter="detector",
        )
        _check_labels(path, self._model.config)
        try:
            self._processor = Mask2FormerImageProcessorPil.from_pretrained(str(path), revision=revision or "main")
        except (OSError, ValueError, TypeError) as error:
            raise cannot_load("detector", path, "a Mask2Former preprocessor configuration", error) from error

    def __call__(self, pictures: NDArray[np.uint8]) -> Iterator[list[Detection]]:
        """The objects on each of the pictures, 8 bit ``[B, H, W, 3]``, with a score above `THRESHOLD`, best first."""
        for start in range(0, len(pictures), self._batch_size):
            yield from self._detect(pictures[start : start + self._batch_size])

    def _detect(self, pictures: NDArray[np.uint8]) -> list[list[Detection]]:
        inputs = self._processor(images=list(pictures), input_data_format="channels_last", return_tensors="pt")
        device, dtype = self._model.device, self._model.dtype
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            outputs = self._model(
                pixel_values=inputs["pixel_values"].to(device, dtype), pixel_mask=inputs["pixel_mask"].to(device)
            )
            outputs.class_queries_logits = outputs.class_queries_logits.float()
            outputs.masks_queries_logits = outputs.masks_queries_logits.float()
            return find_instances(self._processor, outputs, pictures.shape[1:3])


def find_instances(processor: Any, outputs: Any, size: tuple[int, int]) -> list[list[Detection]]:
    """From the model's output for B pictures of ``size`` (height, width) to the objects on each, best first.

    The score of an object is the probability of its class times the mean probability of its mask. Masks are cut at 0.5
    and scaled to the picture; boxes are the bounds of the masks. Objects may overlap, and nothing is suppressed:
    GenEval sets its overlap threshold to 1.

    Args:
        processor: transformers' Mask2Former image processor.
        outputs: Of the model, float32.
        size: Height and width of the pictures.
    """
    results = processor.post_process_instance_segmentation(
        outputs,
        threshold=THRESHOLD,
        target_sizes=[size] * len(outputs.class_queries_logits),
        return_binary_maps=True,  # one map per object: in a common map, a later object hides an earlier one
    )
    return [_detections(result["segmentation"], result["segments_info"]) for result in results]


def _detections(masks: torch.Tensor, segments: list[dict[str, Any]]) -> list[Detection]:
    if not segments:  # then `masks` is one empty map instead of a stack of none
        return []
    stack = masks.bool().cpu().numpy()
    found = [
        Detection(CLASSES[segment["label_id"]], segment["score"], _bounds(mask), mask)
        for mask, segment in zip(stack, segments, strict=True)
    ]
    return sorted(found, key=lambda detection: -detection.score)  # transformers leaves them unsorted


def _bounds(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _check_labels(path: str | Path, config: Any) -> None:
    if config.num_labels != len(CLASSES):
        raise InvalidArgumentError(
            f"`detector` must have the {len(CLASSES)} instance labels of COCO. Found {config.num_labels} labels in "
            f"{str(path)!r}. Pass an instance segmentation checkpoint trained on COCO."
        )
    moved = [(i, name) for i, name in config.id2label.items() if name in CLASSES and CLASSES[int(i)] != name]
    if moved:  # other spellings, such as "aeroplane", are fine; another order is not
        index, name = moved[0]
        raise InvalidArgumentError(
            f"`detector` must have its labels in COCO's order, because they are mapped by index. Found {name!r} in "
            f"place {index} of {str(path)!r}, where {CLASSES[int(index)]!r} belongs."
        )
