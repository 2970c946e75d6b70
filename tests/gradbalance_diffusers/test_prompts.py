import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.assembly import evaluation_prompts, training_prompts
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.prompt_rules import GENEVAL_TAGS
from gradbalance_diffusers.prompt_sampler import apportion
from gradbalance_diffusers.prompts import Prompt, StratifiedSampler, load_prompts, load_sources, without_held_out
from gradbalance_diffusers.rewards.geneval_request import read_request

GENEVAL = {
    "tag": "position",
    "include": [{"class": "laptop", "count": 1}, {"class": "cow", "count": 1, "position": ["right of", 0]}],
    "prompt": "a photo of a cow right of a laptop",
}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_text_files_hold_one_prompt_a_line(tmp_path):
    path = write(tmp_path / "a.txt", "a cat\n  a dog \nein Schloß")
    assert [p.text for p in load_prompts(path, "general")] == ["a cat", "a dog", "ein Schloß"]


def test_blank_lines_are_left_out_and_counted(tmp_path):
    path = write(tmp_path / "a.txt", "a cat\n\n  \na dog\n")
    with pytest.warns(UserWarning, match=r"a\.txt: left out 2 blank lines of 4"):
        prompts = load_prompts(path, "general")
    assert [p.text for p in prompts] == ["a cat", "a dog"]


def test_line_breaks_of_windows_and_separators_inside_a_prompt(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa cat\r\na dog with a \u2028 separator\r\n".encode())
    assert [p.text for p in load_prompts(path, "general")] == ["a cat", "a dog with a \u2028 separator"]


def test_geneval_rows_keep_their_metadata(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps(GENEVAL) + "\n")
    (prompt,) = load_prompts(path, "geneval")
    assert prompt == Prompt(GENEVAL["prompt"], "geneval", {"tag": "position", "include": GENEVAL["include"]})
    assert prompt in {prompt: 1}


@pytest.mark.parametrize(
    ("name", "source", "text", "words"),
    [
        ("a.txt", "general", "", "at least one prompt"),
        ("a.txt", "general", "\n \n", "at least one prompt"),
        ("a.jsonl", "general", "\n", "at least one prompt"),
        ("a.txt", "ocr", 'a sign "HI"\na sign\n', "line 2: an OCR prompt"),
        ("a.txt", "ocr", 'a sign " "\n', "line 1: an OCR prompt"),
        ("a.txt", "ocr", 'a sign "half\n', "line 1: an OCR prompt"),
        ("a.txt", "ocr", 'a sign "A" and "B"\n', "exactly one text to draw"),
        ("a.txt", "ocr", "a sign \u201cA\u201d\n", "straight double quotes"),
        ("a.jsonl", "general", '{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        ("a.jsonl", "general", '{"text": "a"}\n', 'line 1: a row must be an object with a non-empty text "prompt"'),
        ("a.jsonl", "general", '{"prompt": 3}\n', "line 1: a row"),
        ("a.jsonl", "general", '["a"]\n', "line 1: a row"),
        ("a.jsonl", "general", '\n{"prompt": " "}\n', "line 2: a row"),
        ("a.jsonl", "geneval", '{"prompt": "a"}\n', "line 1: a GenEval prompt"),
        ("a.jsonl", "geneval", '{"prompt": "a", "include": [{"class": "a", "count": 0}]}\n', "line 1: a GenEval"),
        ("a.jsonl", "geneval", '{"prompt": "a", "include": []}\n', "line 1: a GenEval prompt: `include` must be"),
        (
            "a.jsonl",
            "geneval",
            '{"prompt": "a", "tag": "color", "include": [{"class": "a", "count": 1}]}\n',
            "Found 'color'. Did you mean 'colors'?",
        ),
        (
            "a.jsonl",
            "geneval",
            '{"prompt": "a", "include": [{"class": "a", "count": 1, "position": ["left of", 0]}]}\n',
            "line 1: a GenEval prompt: `include`: position must be",
        ),
        (
            "a.jsonl",
            "geneval",
            '{"prompt": "a", "include": [{"class": "a", "count": 1}], "exclude": [{"class": "a"}]}\n',
            "line 1: a GenEval prompt: `exclude`: count must be",
        ),
        ("a.jsonl", "ocr", '{"prompt": "\\"A\\"", "source": "general"}\n', "line 1: the row belongs to"),
        ("a.txt", "geneval", "a cat\n", "line 1: a GenEval prompt"),
        ("a.txt", "poems", "a cat\n", "`source` must be one of general, ocr, geneval"),
        ("a.csv", "general", "a cat\n", ".txt or .jsonl"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, name, source, text, words):
    path = write(tmp_path / name, text)
    with pytest.raises(InvalidArgumentError) as caught:
        load_prompts(path, source)
    assert words in str(caught.value)
    assert source == "poems" or str(path) in str(caught.value)


def test_missing_and_misencoded_files_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="existing"):
        load_prompts(tmp_path / "absent.txt", "general")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        load_prompts(tmp_path / "latin.txt", "general")


def test_packaged_prompts_have_disjoint_splits():
    sources = {"general": "tiny", "ocr": "tiny", "geneval": "tiny"}
    train, test = load_sources(sources, "train"), load_sources(sources, "test", limit=5)
    for source in sources:
        assert len(test[source]) == 5
        assert not {p.text for p in train[source]} & {p.text for p in test[source]}
        assert all(p.source == source and "background" in p.metadata for p in train[source])


@pytest.mark.parametrize("source", ["general", "ocr", "geneval"])
def test_packaged_examples_are_valid_and_their_halves_disjoint(source):
    train, test = (load_sources({source: "packaged"}, split)[source] for split in ("train", "test"))
    assert len(train) == len(test) == 30
    assert len({p.text.lower() for p in [*train, *test]}) == 60
    if source == "geneval":
        for half in (train, test):
            assert Counter(p.metadata["tag"] for p in half) == dict.fromkeys(GENEVAL_TAGS, 5)
            for prompt in half:
                read_request(prompt.metadata["include"], prompt.metadata.get("exclude"), prompt.metadata["tag"])


def test_held_out_texts_leave_the_training_prompts_and_are_counted():
    training = {"ocr": [Prompt("A  sign", "ocr"), Prompt("a bus", "ocr")], "general": [Prompt("a dog", "general")]}
    held_out = {"general": [Prompt("a sign", "general"), Prompt("a cat", "general")]}
    with pytest.warns(UserWarning, match=r"1 of the 2 training prompts of 'ocr'.*'A  sign'"):
        kept = without_held_out(training, held_out)
    assert {name: [p.text for p in prompts] for name, prompts in kept.items()} == {
        "ocr": ["a bus"],
        "general": ["a dog"],
    }
    with pytest.raises(InvalidArgumentError, match=r"`prompts\.sources\.general`.*all 1 of them.*two different files"):
        without_held_out(training, {"general": [Prompt("A DOG", "general")]})


def test_a_run_does_not_train_on_any_line_of_its_held_out_files(tmp_path):
    train = write(tmp_path / "train.txt", "a\nb\nc\n")
    test = write(tmp_path / "test.txt", "d\nB\n")
    options = [f"prompts.sources={{general: '{train}'}}", "prompts.mix={general: 1}", "evaluation.prompts_per_source=1"]
    config = load_config("tiny", [*options, f"evaluation.sources={{general: '{test}'}}"])
    with pytest.warns(UserWarning, match="1 of the 3"):
        assert [p.text for p in training_prompts(config)["general"]] == ["a", "c"]
    assert [p.text for p in evaluation_prompts(config)] == ["d"]


def test_what_the_detector_cannot_see_is_refused_before_the_run(tmp_path):
    row = {"prompt": "a photo of a unicorn", "include": [{"class": "unicorn", "count": 1}]}
    path = write(tmp_path / "a.jsonl", json.dumps(row) + "\n")
    options = [f"prompts.sources={{geneval: '{path}'}}", "prompts.mix={geneval: 1}"]
    options += ["evaluation.sources={geneval: packaged}", "rewards=[geneval]"]
    with pytest.raises(InvalidArgumentError, match=r"'a photo of a unicorn' cannot be scored.*'unicorn'"):
        training_prompts(load_config("tiny", options))


def test_sources_mix_files_and_packaged_prompts(tmp_path):
    path = write(tmp_path / "a.txt", "one\ntwo\nthree\n")
    loaded = load_sources({"general": str(path), "ocr": "tiny"}, "train", limit=2)
    assert [p.text for p in loaded["general"]] == ["one", "two"]
    assert len(loaded["ocr"]) == 2


def make_sampler(sizes, mix, groups, seed=0):
    prompts = {source: [Prompt(f"{source} {i}", source) for i in range(size)] for source, size in sizes.items()}
    return StratifiedSampler(prompts, mix, groups, images_per_prompt=3, seed=seed)


MIXES = st.dictionaries(st.sampled_from(["general", "ocr", "geneval"]), st.floats(0.5, 5), min_size=1)


@given(MIXES, st.integers(20, 60), st.integers(0, 2**40), st.integers(0, 10**6), st.integers(1, 40))
def test_epochs_keep_the_mix_and_do_not_repeat_prompts(mix, groups, seed, epoch, size):
    sampler = make_sampler(dict.fromkeys(mix, size), mix, groups, seed)
    drawn = sampler.epoch(epoch)
    assert len(drawn) == groups
    assert Counter(p.source for p in drawn) == sampler.source_counts
    for source, count in sampler.source_counts.items():
        assert abs(count - groups * mix[source] / sum(mix.values())) < 1
        uses = Counter(p.text for p in drawn if p.source == source)
        assert max(uses.values()) == -(-count // size)
        assert len(uses) == min(count, size)
    assert make_sampler(dict.fromkeys(mix, size), mix, groups, seed).epoch(epoch) == drawn


@given(MIXES, st.integers(0, 500))
def test_apportioned_counts_add_up_and_differ_from_the_exact_share_by_less_than_one(mix, total):
    counts = apportion(mix, total)
    assert sum(counts.values()) == total
    for source, count in counts.items():
        assert abs(count - total * mix[source] / sum(mix.values())) < 1 + 1e-9


def test_epochs_and_seeds_differ_and_other_sources_do_not_disturb():
    base = make_sampler({"ocr": 100}, {"ocr": 1}, 10)
    assert base.epoch(0) != base.epoch(1)
    assert base.epoch(0) != make_sampler({"ocr": 100}, {"ocr": 1}, 10, seed=1).epoch(0)
    both = make_sampler({"ocr": 100, "general": 50}, {"general": 1, "ocr": 1}, 20)
    assert [p for p in both.epoch(3) if p.source == "ocr"] == base.epoch(3)


def test_any_stretch_of_an_epoch_has_about_the_mix():
    drawn = make_sampler({"ocr": 99, "geneval": 99, "general": 99}, {"ocr": 3, "geneval": 4, "general": 1}, 24).epoch(5)
    for start in (0, 8, 16):
        assert Counter(p.source for p in drawn[start : start + 8]) == {"ocr": 3, "geneval": 4, "general": 1}


def test_samples_repeat_every_prompt_in_a_row():
    sampler = make_sampler({"ocr": 5}, {"ocr": 1}, 4)
    groups, samples = sampler.epoch(2), sampler.samples(2)
    assert [samples[i] for i in range(12)] == [groups[i // 3] for i in range(12)]


def test_repeated_texts_count_once():
    prompts = {"ocr": [Prompt("a", "ocr", {"n": 1}), Prompt("b", "ocr"), Prompt("a", "ocr", {"n": 2})]}
    sampler = StratifiedSampler(prompts, {"ocr": 1}, 2, 2, seed=0)
    assert sampler.prompts["ocr"] == [Prompt("a", "ocr", {"n": 1}), Prompt("b", "ocr")]


@pytest.mark.parametrize(
    ("sizes", "mix", "groups", "words"),
    [
        ({"ocr": 3}, {"ocr": 1, "general": 1}, 4, r"\['general'\]"),
        ({"ocr": 0}, {"ocr": 1}, 4, r"\['ocr'\]"),
        ({"ocr": 3}, {}, 4, "an empty mix"),
        ({"ocr": 3, "general": 3}, {"ocr": 100, "general": 1}, 4, r"\['general'\] no prompt at all"),
    ],
)
def test_a_mix_that_cannot_be_drawn_is_refused(sizes, mix, groups, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make_sampler(sizes, mix, groups)
