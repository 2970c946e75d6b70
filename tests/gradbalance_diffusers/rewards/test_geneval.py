"""The GenEval reward: colors by CLIP, the way from pictures to scores, and which rows it scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from scipy import ndimage
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.assembly import load_rewards
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.rewards import Reward, RewardSet, geneval, make_reward
from gradbalance_diffusers.rewards.geneval import GenEval
from gradbalance_diffusers.rewards.geneval_color import ColorNamer, cut_out
from gradbalance_diffusers.rewards.geneval_detector import Mask2FormerDetector
from gradbalance_diffusers.rewards.geneval_request import COLORS, read_request
from gradbalance_diffusers.rewards.geneval_rules import Detection, judge, select
from gradbalance_diffusers.rewards.images import MEAN, STD, to_uint8
from gradbalance_diffusers.rewards.models import load_clip
from small_detector import save_small_detector

COW, DOG, CUP = 10, 14, 18  # heights in pixels that the detector of these tests knows things by
LABELS = {COW: "cow", DOG: "dog", CUP: "cup"}
WHITE = (255, 255, 255)
RGB = {"red": (200, 30, 30), "green": (30, 160, 30), "blue": (40, 60, 220), "yellow": (230, 210, 40)}

Thing = tuple[int, str, tuple[int, int]]


def draw(*things: Thing) -> torch.Tensor:
    """A white picture of 80 x 64 pixels with 12 pixels wide blocks, each (height, color, left top corner)."""
    image = Image.new("RGB", (80, 64), WHITE)
    for height, color, (x, y) in things:
        ImageDraw.Draw(image).rectangle((x, y, x + 11, y + height - 1), fill=RGB[color])
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


class BlockDetector:
    """Finds the blocks of `draw`; the further right, the surer."""

    def __init__(self, *_: object, **options: Any) -> None:
        self.options, self.seen = options, 0

    def __call__(self, pictures: np.ndarray) -> Iterator[list[Detection]]:
        for picture in pictures:
            self.seen += 1
            regions, n = ndimage.label((picture != WHITE).any(axis=-1))
            found = []
            for i, (rows, columns) in enumerate(ndimage.find_objects(regions, n), start=1):
                box = (columns.start, rows.start, columns.stop, rows.stop)
                label = LABELS[rows.stop - rows.start]
                found.append(Detection(label, 0.5 + columns.start / 200, box, regions == i))
            yield found


class MeanColorCLIP:
    """A picture is its mean color, and a text the color that it names."""

    image_size = 8
    device = torch.device("cpu")

    def image_features(self, pixels: torch.Tensor) -> torch.Tensor:
        mean = pixels.mean(dim=(2, 3)) * torch.tensor(STD) + torch.tensor(MEAN)
        return torch.nn.functional.normalize(mean - 0.4, dim=-1)

    def text_features(self, texts: list[str]) -> torch.Tensor:
        words = [next((word for word in text.replace("-", " ").split() if word in RGB), "") for text in texts]
        return torch.nn.functional.normalize(
            torch.tensor([RGB.get(word, (102, 102, 0)) for word in words]) / 255 - 0.4, dim=-1
        )


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """GenEval with a detector of blocks and a CLIP of mean colors."""
    monkeypatch.setattr(geneval, "Mask2FormerDetector", BlockDetector)
    monkeypatch.setattr(geneval, "load_clip", lambda *_, **__: MeanColorCLIP())


def want(label: str, count: int = 1, color: str | None = None, position: list | None = None) -> dict:
    row: dict[str, Any] = {"class": label, "count": count}
    return row | ({"color": color} if color else {}) | ({"position": position} if position else {})


RED_COW = [want("cow", 1, "red")]
COW_AND_DOG = [want("dog", 1, "blue"), want("cow", 1, "red")]
COW_LEFT_OF_DOG = [want("dog"), want("cow", position=["left of", 0])]
LEFT, MIDDLE, RIGHT = (2, 4), (32, 30), (62, 4)

PICTURES = [
    # things, include, partial, accuracy, strict
    ([(COW, "red", LEFT)], RED_COW, 1, 1, 1),
    ([(COW, "green", LEFT)], RED_COW, 1 / 2, 0, 0),
    ([(DOG, "red", LEFT)], RED_COW, 0, 0, 0),
    ([(COW, "red", RIGHT), (COW, "blue", LEFT)], RED_COW, 0, 1, 0),  # the surer one is red
    ([(COW, "red", LEFT), (COW, "blue", RIGHT)], RED_COW, 0, 0, 0),
    ([(COW, "red", LEFT), (DOG, "blue", RIGHT)], COW_AND_DOG, 1, 1, 1),
    ([(COW, "blue", LEFT), (DOG, "red", RIGHT)], COW_AND_DOG, 1 / 2, 0, 0),
    ([(COW, "red", LEFT), (DOG, "green", RIGHT)], COW_AND_DOG, 3 / 4, 0, 0),
    ([(COW, "red", LEFT), (DOG, "blue", RIGHT), (CUP, "green", MIDDLE)], COW_AND_DOG, 1, 1, 1),
    ([(COW, "red", LEFT), (DOG, "blue", RIGHT)], COW_LEFT_OF_DOG, 1, 1, 1),
    ([(DOG, "red", LEFT), (COW, "blue", RIGHT)], COW_LEFT_OF_DOG, 2 / 3, 0, 0),
]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("score", "column"), [("partial", 2), ("accuracy", 3), ("strict", 4)])
def test_pictures_with_known_answers(score, column) -> None:
    images = torch.stack([draw(*row[0]) for row in PICTURES])
    scores = GenEval(score=score)(images, [""] * len(images), include=[row[1] for row in PICTURES])
    assert scores == pytest.approx([row[column] for row in PICTURES])


@pytest.mark.usefixtures("blocks")
def test_tag_and_exclude_are_looked_at() -> None:
    three = draw((COW, "red", (2, 4)), (COW, "red", (32, 4)), (COW, "red", (62, 4)))  # surer than 0.5, 0.65, 0.8
    images, two = three.expand(3, -1, -1, -1), [want("cow", 2)]
    verdicts = GenEval().verdicts(
        images, include=[two] * 3, exclude=[None, [want("cow", 3)], [want("cow", 4)]], tag=["counting", None, "colors"]
    )
    assert [v and v.accurate for v in verdicts] == [False, False, True]
    assert [v and v.partial for v in verdicts] == [0, 1 / 2, 1 / 2], "no cow is as sure as counting wants it"
    assert verdicts[1]
    assert verdicts[1].reasons == ("expected exactly 2 cow, found 3", "expected fewer than 3 cow, found 3")


@pytest.mark.usefixtures("blocks")
def test_published_quirk() -> None:
    image, include = draw((DOG, "red", LEFT), (COW, "blue", RIGHT))[None], [COW_LEFT_OF_DOG]
    assert GenEval(published_quirk=True)(image, [""], include=include) == [(1 + 1 + 0 + 1) / 4]
    with pytest.raises(InvalidArgumentError, match="`published_quirk` changes the partial credit only"):
        GenEval(published_quirk=True, score="strict")


@pytest.mark.usefixtures("blocks")
def test_only_rows_with_include_are_scored_and_looked_at() -> None:
    reward = GenEval()
    images = draw((COW, "red", LEFT)).expand(4, -1, -1, -1)
    assert reward(images, [""] * 4) == [None] * 4
    assert reward(images, [""] * 4, source=["general"] * 4, include=[None] * 4) == [None] * 4
    assert reward._detector.seen == 0
    assert reward(images, [""] * 4, include=[None, RED_COW, None, [want("dog")]]) == [None, 1.0, None, 0.0]
    assert reward._detector.seen == 2


@pytest.mark.usefixtures("blocks")
def test_in_a_set_beside_prompts_of_other_sources() -> None:
    images = draw((COW, "red", LEFT)).expand(3, -1, -1, -1)
    rows = [{"source": "general"}, {"source": "geneval", "tag": "colors", "include": RED_COW}, {"source": "ocr"}]
    table = RewardSet({"partial": GenEval(), "strict": GenEval(score="strict")})(images, ["", "", ""], rows)
    assert table.mask.tolist() == [[False, False], [True, True], [False, False]]
    assert table.means() == {"partial": 1, "strict": 1}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("include", "message"),
    [
        ([want("circle")], "class must be one of GenEval's 80 names"),
        ([want("cow", color="beige")], "color must be one of"),
        ([], "`include` must be a list of one or more"),
    ],
)
def test_rows_that_break_a_rule(include, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        GenEval()(draw()[None], [""], include=[include])


def test_an_unknown_score() -> None:
    with pytest.raises(InvalidArgumentError, match=r"`score` must be one of partial, accuracy, strict\. Found 'loose'"):
        GenEval(score="loose")  # type: ignore[arg-type]


class TestColors:
    def test_the_cutout_is_the_published_one(self) -> None:
        """PIL's composite over #999 and crop by the box, as GenEval cuts objects out."""
        rng = np.random.default_rng(1)
        picture = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        mask = np.zeros((30, 40), dtype=bool)
        mask[5:20, 8:30] = rng.random((15, 22)) > 0.4
        blank = Image.new("RGB", (40, 30), "#999")
        expected = Image.composite(Image.fromarray(picture), blank, Image.fromarray(mask)).crop((8, 5, 30, 20))
        detection = Detection("cow", 0.9, (8, 5, 30, 20), mask)
        assert np.array_equal(cut_out(picture, detection), np.asarray(expected))
        assert np.array_equal(cut_out(picture, Detection("cow", 0.9, (8, 5, 30, 20))), picture[5:20, 8:30])

    @torch.no_grad()
    def test_colors_agree_with_the_bare_model(self, clip_path: Path) -> None:
        model, tokenizer = CLIPModel.from_pretrained(clip_path).eval(), AutoTokenizer.from_pretrained(clip_path)
        processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        rng = np.random.default_rng(2)
        cutouts = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((9, 30), (17, 16), (40, 12), (3, 3))]
        labels = ["cow", "cup", "cow", "traffic light"]
        expected = []
        for cutout, label in zip(cutouts, labels, strict=True):
            pixels = processor(images=[Image.fromarray(cutout)], return_tensors="pt")
            image = model.get_image_features(**pixels).pooler_output[0]
            similarity = []
            for color in COLORS:
                texts = [f"a photo of a {color} {label}", f"a photo of a {color}-colored {label}"]
                tokens = tokenizer([*texts, f"a photo of a {color} object"], padding=True, return_tensors="pt")
                features = model.get_text_features(**tokens).pooler_output
                average = (features / features.norm(dim=-1, keepdim=True)).mean(dim=0)
                similarity.append(image @ average / average.norm() / image.norm())
            expected.append(torch.stack(similarity))
        clip = load_clip(clip_path, device="cpu")
        assert torch.allclose(ColorNamer(clip).cosines(cutouts, labels), torch.stack(expected), atol=1e-5)
        names = [COLORS[int(row.argmax())] for row in expected]
        assert all(ColorNamer(clip, batch_size=n)(cutouts, labels) == names for n in (1, 3, 32))

    def test_nothing_to_name(self, clip_path: Path) -> None:
        assert ColorNamer(load_clip(clip_path, device="cpu"))([], []) == []

    @pytest.mark.parametrize("color", RGB)
    def test_every_color_is_named(self, color: str) -> None:
        cutout = np.full((5, 7, 3), RGB[color], dtype=np.uint8)
        assert ColorNamer(MeanColorCLIP())([cutout], ["cow"]) == [color]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def detector_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_detector(tmp_path_factory.mktemp("detector"))


class TestModels:
    """The real models, very small and random, from local folders."""

    images = torch.stack([draw(*row[0]) for row in PICTURES[:6]])

    def test_scores_are_those_of_the_parts(self, detector_path, clip_path) -> None:
        detector = Mask2FormerDetector(detector_path, device="cpu")
        namer = ColorNamer(load_clip(clip_path, device="cpu"))
        pictures = to_uint8(self.images)
        seen = [select(found, "colors") for found in detector(pictures)]
        # Ask for what is there, in some color, so that all rules are met.
        include = [[want(label, max(1, len(objects)), "red") for label, objects in found.items()] for found in seen]
        expected = []
        for picture, found, entries in zip(pictures, seen, include, strict=True):
            named = {
                label: [
                    Detection(label, d.score, d.box, d.mask, namer([cut_out(picture, d)], [label])[0]) for d in objects
                ]
                for label, objects in found.items()
            }
            expected.append(judge(named, read_request(entries)))
        reward = make_reward("geneval", detector=detector_path, clip=clip_path, device="cpu", batch_size=4)
        assert isinstance(reward, Reward)
        assert reward.verdicts(self.images, include=include) == expected
        assert reward(self.images, [""] * 6, include=include) == [verdict.partial for verdict in expected]
        assert all(verdict.partial >= 1 / 2 for verdict in expected), "all counts are right"

    def test_half_precision_and_options_reach_both_models(self, detector_path, clip_path) -> None:
        reward = make_reward("geneval", detector=detector_path, clip=clip_path, device="cpu", dtype="bfloat16")
        scores = reward(self.images, [""] * 6, include=[RED_COW] * 6)
        assert all(0 <= score <= 1 for score in scores)
        assert reward._detector._model.dtype == reward._name_colors._clip._model.dtype == torch.bfloat16

    def test_partial_and_strict_side_by_side_from_a_configuration(self, detector_path, clip_path) -> None:
        options = f"detector: {detector_path}, clip: {clip_path}, device: cpu"
        rewards = f"[{{name: geneval, options: {{{options}}}}}, "
        rewards += f"{{name: geneval-strict, kind: geneval, options: {{score: strict, {options}}}}}]"
        stages = "stages=[{name: all, epochs: 40, rewards: [geneval]}]"
        rewards_of_run = load_rewards(load_config("tiny", [f"rewards={rewards}", stages]))
        rows = [{"source": "geneval", "include": [want("person")]}, {"source": "general"}]
        table = rewards_of_run(self.images[:2], ["", ""], rows)
        assert table.names == ("geneval", "geneval-strict")
        assert table.mask.tolist() == [[True, True], [False, False]]

    def test_paths_that_lead_nowhere_are_named(self, detector_path, clip_path) -> None:
        with pytest.raises(InvalidArgumentError, match=r"`detector` must be .*'/no/detector'"):
            make_reward("geneval", detector="/no/detector", clip=clip_path, device="cpu")
        with pytest.raises(InvalidArgumentError, match=r"`clip` must be .*'/no/clip'"):
            make_reward("geneval", detector=detector_path, clip="/no/clip", device="cpu")
        with pytest.raises(InvalidArgumentError, match="`detector` must"):
            make_reward("geneval", detector=clip_path, clip=clip_path, device="cpu")
