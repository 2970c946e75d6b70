import pytest

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.tiny.prompts import SOURCES, TAG_SHARES, all_prompts, tiny_prompts


def test_train_and_test_share_no_text_and_cover_everything():
    for source in SOURCES:
        train, test = ({row["prompt"] for row in tiny_prompts(split, source)} for split in ("train", "test"))
        assert not train & test
        assert train | test == {row["prompt"] for row in all_prompts(source)}
        assert len(test) >= 5


def test_texts_are_unique():
    prompts = [row["prompt"] for source in SOURCES for row in all_prompts(source)]
    assert len(prompts) == len(set(prompts))


def test_order_is_fixed_by_the_seed():
    assert tiny_prompts("test", "geneval", 20, seed=3) == tiny_prompts("test", "geneval", 20, seed=3)
    assert tiny_prompts("test", "geneval", 20, seed=3) != tiny_prompts("test", "geneval", 20, seed=4)


def test_prefixes_mix_the_tags():
    rows = tiny_prompts("train", "geneval", 100)
    counts = {tag: sum(row["tag"] == tag for row in rows) for tag in TAG_SHARES}
    assert counts == pytest.approx({tag: 100 * share for tag, share in TAG_SHARES.items()}, abs=2)


def test_every_row_names_its_background_and_source():
    for source in SOURCES:
        for row in all_prompts(source):
            assert row["prompt"].endswith(f"on a {row['background']} background")
            assert row["source"] == source
            assert ("include" in row) == ("tag" in row) == (source == "geneval")


def test_include_describes_the_prompt():
    row = next(
        row for row in all_prompts("geneval") if row["prompt"].startswith("one red circle left of one blue square")
    )
    assert row["include"] == [
        {"class": "square", "count": 1, "color": "blue"},
        {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("valid", "ocr"), "split must be"),
        (("test", "clock"), "source must be one of"),
        (("test", "ocr", 0), "size must lie between"),
        (("test", "general", 10_000), "size must lie between"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        tiny_prompts(*arguments)
