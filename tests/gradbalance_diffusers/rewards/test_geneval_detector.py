"""The detector: what is made of the model's output, and the model with its preprocessing from end to end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.geneval_detector import Mask2FormerDetector, find_instances
from gradbalance_diffusers.rewards.geneval_request import CLASSES
from gradbalance_diffusers.rewards.geneval_rules import Detection
from small_detector import save_small_detector

CAT, DOG, MOUSE = CLASSES.index("cat"), CLASSES.index("dog"), 64
SURE, GRID = 20.0, 24  # mask logits and their resolution


def query(probabilities: dict[int, float], *blocks: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one query: the classes with these probabilities, a mask of (left, top, right, bottom) cells of 24."""
    classes = torch.full((81,), -1e4)
    classes[80] = np.log(1 - sum(probabilities.values()) + 1e-9)
    for label, probability in probabilities.items():
        classes[label] = np.log(probability)
    mask = torch.full((GRID, GRID), -SURE)
    for left, top, right, bottom in blocks:
        mask[top:bottom, left:right] = SURE
    return classes, mask


def instances(*queries: tuple[torch.Tensor, torch.Tensor], size: tuple[int, int] = (48, 96)) -> list[Detection]:
    classes, masks = (torch.stack(tensors)[None] for tensors in zip(*queries, strict=True))
    outputs = SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks)
    (found,) = find_instances(Mask2FormerImageProcessorPil(), outputs, size)
    return found


def summary(found: Sequence[Detection]) -> list[tuple[str, float, tuple[float, ...]]]:
    return [(detection.label, round(detection.score, 1), detection.box) for detection in found]


EMPTY = query({CAT: 0.9})


def test_boxes_and_order() -> None:
    # 24 cells across 96 columns and 48 rows: 4 x 2 pixels a cell.
    found = instances(query({CAT: 0.6}, (4, 6, 12, 12)), EMPTY, query({DOG: 0.9}, (16, 0, 24, 24)))
    assert summary(found) == [("dog", 0.9, (64, 0, 96, 48)), ("cat", 0.6, (16, 12, 48, 24))]
    assert found[1].mask is not None
    assert found[1].mask.shape == (48, 96)
    assert found[1].mask[13:23, 17:47].all()
    assert found[1].mask.sum() == pytest.approx(32 * 12, rel=0.02), "corners are rounded off"


def test_what_is_below_the_threshold_or_empty_is_no_object() -> None:
    low = query({CAT: 0.29}, (4, 4, 20, 20))
    assert summary(instances(low, query({CAT: 0.35}, (4, 4, 20, 20)))) == [("cat", 0.3, (16, 8, 80, 40))]
    assert instances(low, EMPTY) == []


def test_the_score_is_class_times_mask_probability() -> None:
    classes, mask = query({CAT: 0.8}, (0, 0, 24, 24))
    (found,) = instances((classes, mask * 0 + 1.0), EMPTY)
    assert found.score == pytest.approx(0.8 * torch.sigmoid(torch.tensor(1.0)).item(), abs=1e-5)
    assert instances((classes, mask * 0 + 0.1), EMPTY)[0].score == pytest.approx(0.8 * 0.52498, abs=1e-4)


def test_objects_may_overlap_and_none_hides_another() -> None:
    below, above = query({CAT: 0.9}, (0, 0, 24, 24)), query({CAT: 0.7}, (6, 6, 18, 18))
    for order in ([below, above], [above, below]):
        found = instances(*order, size=(48, 48))
        assert summary(found) == [("cat", 0.9, (0, 0, 48, 48)), ("cat", 0.7, (12, 12, 36, 36))]
        assert found[0].mask is not None
        assert found[0].mask.all()


def test_one_query_may_be_two_objects() -> None:
    found = instances(query({CAT: 0.54, DOG: 0.42}, (0, 0, 12, 24)), query({CAT: 0.1}), query({DOG: 0.1}))
    assert summary(found) == [("cat", 0.5, (0, 0, 48, 48)), ("dog", 0.4, (0, 0, 48, 48))]


def test_parts_of_one_object_share_a_box() -> None:
    (found,) = instances(query({MOUSE: 0.9}, (0, 0, 2, 2), (22, 22, 24, 24)), EMPTY)
    assert (found.label, found.box) == ("computer mouse", (0, 0, 96, 48))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_detector(tmp_path_factory.mktemp("detector"))


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    """Five pictures of 40 x 60 pixels with colored blocks."""
    rng = np.random.default_rng(0)
    pictures = np.empty((5, 40, 60, 3), dtype=np.uint8)
    for picture in pictures:
        picture[:] = rng.integers(0, 256, 3)
        for _ in range(4):
            x, y = rng.integers(0, 50), rng.integers(0, 30)
            picture[y : y + 9, x : x + 12] = rng.integers(0, 256, 3)
    return pictures


@torch.no_grad()
def reference(path: Path, picture: np.ndarray) -> list[tuple[str, float, tuple[float, ...]]]:
    """Label, score and box of the objects on one picture, from the bare model, one query and class at a time."""
    model = Mask2FormerForUniversalSegmentation.from_pretrained(path).eval()
    processor = Mask2FormerImageProcessorPil.from_pretrained(path)
    outputs = model(**processor(images=[picture], return_tensors="pt"))
    probabilities = outputs.class_queries_logits[0].softmax(dim=-1)[:, :80]
    masks = interpolate(outputs.masks_queries_logits, size=(384, 384), mode="bilinear")[0]
    pairs = [(float(p), q, c) for q, row in enumerate(probabilities) for c, p in enumerate(row)]
    found = []
    for probability, q, label in sorted(pairs, reverse=True)[: len(masks)]:
        inside = masks[q] > 0
        small = interpolate(inside[None, None].float(), size=picture.shape[:2])[0, 0] > 0
        if small.any() and (score := probability * masks[q][inside].sigmoid().mean().item()) >= 0.3:
            y, x = small.nonzero(as_tuple=True)
            box = (x.min().item(), y.min().item(), x.max().item() + 1, y.max().item() + 1)
            found.append((CLASSES[label], pytest.approx(score, abs=1e-5), box))
    return sorted(found, key=lambda entry: -entry[1].expected)


def facts(found: Sequence[Detection]) -> list[tuple[str, float, tuple[float, ...]]]:
    return [(detection.label, detection.score, detection.box) for detection in found]


def test_detector_agrees_with_the_bare_model(path, pictures) -> None:
    found = list(Mask2FormerDetector(path, device="cpu", batch_size=2)(pictures))
    assert len(found) == 5
    assert all(len(detections) >= 3 for detections in found), "or there would be little to compare"
    assert len({facts[0] for detections in found for facts in summary(detections)}) >= 5
    for picture, detections in zip(pictures, found, strict=True):
        assert facts(detections) == reference(path, picture)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_batch_size_changes_nothing(path, pictures, batch_size) -> None:
    two = Mask2FormerDetector(path, device="cpu", batch_size=2)(pictures)
    other = Mask2FormerDetector(path, device="cpu", batch_size=batch_size)(pictures)
    for a, b in zip(two, other, strict=True):
        assert [(d.label, d.box) for d in a] == [(d.label, d.box) for d in b]
        assert [d.score for d in a] == pytest.approx([d.score for d in b], abs=1e-5)


def test_half_precision(path, pictures) -> None:
    exact = next(iter(Mask2FormerDetector(path, device="cpu")(pictures)))
    half = next(iter(Mask2FormerDetector(path, device="cpu", dtype="bfloat16")(pictures)))
    assert exact[0].label == half[0].label
    assert exact[0].score == pytest.approx(half[0].score, abs=0.02)


def test_the_model_is_loaded_once(path) -> None:
    one, two = Mask2FormerDetector(path, device="cpu"), Mask2FormerDetector(path, device="cpu", batch_size=1)
    assert one._model is two._model


def test_old_preprocessor_configurations_load(path, pictures, tmp_path) -> None:
    """Those on the hub were written by transformers 4 and hold keys that it has dropped since."""
    old = shutil.copytree(path, tmp_path / "old")
    file = old / "preprocessor_config.json"
    keys = {"_max_size": 2048, "reduce_labels": False, "num_labels": 80, "feature_extractor_type": "MaskFormer"}
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    found, expected = (next(iter(Mask2FormerDetector(p, device="cpu")(pictures[:1]))) for p in (old, path))
    assert facts(found) == facts(expected)


def test_a_detector_that_is_not_there(tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`detector` must be .*hf download nobody/mask2former"):
        Mask2FormerDetector("nobody/mask2former", device="cpu")
    with pytest.raises(InvalidArgumentError, match="`detector` must be"):
        Mask2FormerDetector(tmp_path, device="cpu")


def test_a_detector_without_preprocessor_configuration(path, tmp_path) -> None:
    bare = shutil.copytree(path, tmp_path / "bare", ignore=lambda *_: ["preprocessor_config.json"])
    with pytest.raises(InvalidArgumentError, match=r"`detector` must be .* a Mask2Former preprocessor configuration"):
        Mask2FormerDetector(bare, device="cpu")


def test_a_detector_with_other_labels(path, tmp_path) -> None:
    panoptic = save_small_detector(tmp_path / "panoptic", labels=133)
    with pytest.raises(InvalidArgumentError, match=r"80 instance labels of COCO\. Found 133 labels"):
        Mask2FormerDetector(panoptic, device="cpu")


def test_labels_in_another_order_are_refused_and_other_spellings_are_not(path, tmp_path) -> None:
    names = {str(i): name for i, name in enumerate(CLASSES)} | {"4": "aeroplane", "64": "mouse"}

    def save(name: str, labels: dict[str, str]) -> Path:
        folder = shutil.copytree(path, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        config |= {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    Mask2FormerDetector(save("spelled", names), device="cpu")
    swapped = names | {"15": names["16"], "16": names["15"]}
    with pytest.raises(InvalidArgumentError, match=r"Found 'dog' in place 15 of .*where 'cat' belongs"):
        Mask2FormerDetector(save("swapped", swapped), device="cpu")


def test_a_batch_size_of_none(path) -> None:
    with pytest.raises(InvalidArgumentError, match="`batch_size` must be a positive integer"):
        Mask2FormerDetector(path, device="cpu", batch_size=0)
