from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.evaluating.folder import EvaluationFolder
from gradbalance_diffusers.evaluating.histograms import histogram
from gradbalance_diffusers.evaluating.pictures import cases, first_of_each_source
from gradbalance_diffusers.evaluating.report import headline, write_results
from gradbalance_diffusers.evaluating.results import Results
from gradbalance_diffusers.evaluating.table import markdown_table
from gradbalance_diffusers.prompts import Prompt
from gradbalance_diffusers.sections import RewardConfig
from html_page import parse

Scored = Callable[..., EvaluationFolder]


def column(*values: float | None) -> dict[tuple[int, int], float | None]:
    """Scores of one picture of each prompt."""
    return {(prompt, 0): value for prompt, value in enumerate(values)}


@pytest.fixture
def compared(scored: Scored, prompts: list[Prompt]) -> EvaluationFolder:
    """Two models; `x` applies to all prompts, `ocr` to the second only, `geneval` to the third."""
    return scored(
        prompts,
        {
            "base": {"x": column(0.1, 0.2, 0.3), "ocr": column(None, 0.5, None), "geneval": column(None, None, 0.0)},
            "nft": {"x": column(0.2, 0.3, 0.7), "ocr": column(None, 1.0, None), "geneval": column(None, None, 1.0)},
        },
    )


def test_means_and_changes_by_hand(compared: EvaluationFolder) -> None:
    results = Results(compared)
    assert results.metrics == ["x", "ocr", "geneval"]
    mean = results.estimate("nft", "x")
    assert (mean.mean, mean.se) == pytest.approx((0.4, np.std([0.2, 0.3, 0.7], ddof=1) / 3**0.5))
    change = results.change("nft", "x")
    assert (change.mean, change.se) == pytest.approx((0.2, np.std([0.1, 0.1, 0.4], ddof=1) / 3**0.5))
    assert (change.pictures, change.prompts) == (3, 3)
    assert results.change("nft", "ocr").mean == 0.5
    assert results.change("nft", "ocr").se is None
    assert results.composite == pytest.approx({"base": -(0.5**0.5), "nft": 0.5**0.5})


def test_a_change_is_over_pictures_that_both_have(scored: Scored, prompts: list[Prompt]) -> None:
    folder = scored(prompts, {"base": {"x": column(0.0, 5.0, None)}, "new": {"x": column(1.0, None, 7.0)}})
    change = Results(folder).change("new", "x")
    assert (change.mean, change.pictures) == (1.0, 1)


def test_pictures_of_one_text_are_one_prompt(scored: Scored) -> None:
    # GenEval's file holds every prompt four times.
    prompts = [Prompt("same", "geneval"), Prompt("same", "geneval"), Prompt("other", "geneval")]
    estimate = Results(scored(prompts, {"base": {"x": column(0.0, 1.0, 5.0)}})).estimate("base", "x")
    assert estimate.prompts == 2
    assert estimate.se == pytest.approx(2.0)


def test_the_order_of_the_models_is_the_callers(compared: EvaluationFolder) -> None:
    results = Results(compared, ["nft", "base"])
    assert results.change("base", "x").mean == pytest.approx(-0.2)


def test_what_is_not_scored_is_counted(scored: Scored, prompts: list[Prompt]) -> None:
    folder = scored(prompts, {"base": {"x": column(0.0, 1.0, None), "y": column(1.0)}})
    results = Results(folder)
    assert (results.unscored("base", "x"), results.unscored("base", "y")) == (0, 2)
    assert "2 scores are missing; run --only score again." in markdown_table(results)
    write_results(folder)
    html = (folder.path / "report.html").read_text()
    coverage = r'<td>(\d) <span class="error">of 3</span>( <span class="down">2 unscored</span>)?</td>'
    cells = re.findall(coverage, html)
    assert [(count, bool(open_)) for count, open_ in cells] == [("2", False), ("1", True)]


def test_a_metric_without_a_value_is_named(scored: Scored, prompts: list[Prompt]) -> None:
    folder = scored(prompts, {"base": {"x": column(0.0, 1.0, 2.0), "y": column(None, None, None)}})
    folder.add_metrics([RewardConfig(name="z")])
    results = Results(folder)
    assert (results.metrics, results.without_value) == (["x"], ["y", "z"])
    assert "Without a value: y, z." in markdown_table(results)


def test_tags_are_those_of_prompts_that_have_one(compared: EvaluationFolder) -> None:
    results = Results(compared)
    assert {tag: e.mean for tag, e in results.tags("nft", "geneval").items()} == {"counting": 1.0}
    assert results.tags("nft", "x") == {}


def test_nothing_scored_is_refused(scored: Scored, prompts: list[Prompt]) -> None:
    folder = scored(prompts, {"base": {"x": column(None, None)}})
    with pytest.raises(InvalidArgumentError, match=r"must hold scores to report. Found none of \['base'\]"):
        Results(folder)
    with pytest.raises(InvalidArgumentError, match="must hold the model 'other'"):
        Results(folder, ["other"])


def test_the_table_by_hand(compared: EvaluationFolder) -> None:
    assert markdown_table(Results(compared)).splitlines() == [
        "| model | GenEval | OCR | x | composite |",
        "|---|---|---|---|---|",
        "| base | 0.00 | 0.50 | 0.200 ± 0.058 | −0.707 |",
        "| nft | 1.00 | 1.00 | 0.400 ± 0.153 | +0.707 |",
        "",
        "Change from base on the same prompts and noise, with its 95 % confidence interval:",
        "",
        "| model | GenEval | OCR | x |",
        "|---|---|---|---|",
        "| nft | +1.00 | +0.50 | +0.200 [−0.230, +0.630] |",
        "",
        "3 prompts, 3 pictures a model. ± is one standard error over prompts. Composite: mean over the metrics of the "
        "z-score among the models of this table; no absolute meaning.",
    ]


def test_the_papers_columns_are_in_its_order_and_units(scored: Scored, prompts: list[Prompt]) -> None:
    names = ("unifiedreward", "imagereward", "aesthetic", "hpsv2", "clipscore", "pickscore", "ocr", "own", "geneval")
    folder = scored(prompts, {"base": {name: column(0.5) for name in names}}, {"geneval": "geneval_geometry"})
    head, _, row, *_, notes = markdown_table(Results(folder)).splitlines()
    assert head == "| model | OCR | PickScore | CLIPScore | HPSv2.1 | Aesthetic | ImgRwd | UniRwd | own | geneval |"
    assert row == "| base | 0.50 | 13.00 | 0.500 | 0.500 | 0.50 | 0.50 | 2.50 | 0.500 | 0.500 |"
    assert "PickScore is 26 times the score and UniRwd is 5 times the score, as in the paper." in notes


def test_files_are_written_and_agree(compared: EvaluationFolder) -> None:
    said = write_results(compared)
    table = (compared.path / "results.md").read_text()
    assert said.startswith(table)
    assert str(compared.path / "report.html") in said
    record = json.loads((compared.path / "results.json").read_text())
    assert record["compared_with"] == "base"
    assert [model["name"] for model in record["models"]] == ["base", "nft"]
    scores = record["models"][1]["scores"]
    assert scores["x"]["mean"] == pytest.approx(0.4)
    assert scores["x"]["change"]["mean"] == pytest.approx(0.2)
    assert scores["geneval"]["tags"]["counting"]["mean"] == 1.0
    assert "change" not in record["models"][0]["scores"]["x"]
    first = {name: (compared.path / name).read_bytes() for name in ("results.json", "results.md", "report.html")}
    write_results(compared)
    assert first == {name: (compared.path / name).read_bytes() for name in first}


def test_the_page_is_whole_and_needs_no_network(compared: EvaluationFolder) -> None:
    write_results(compared)
    path = compared.path / "report.html"
    page = parse(path)
    assert all(link is not None and link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.links) == 2 * 3
    assert not re.search(r"https?://|@import|<script", path.read_text("utf-8"))
    text = " ".join(page.text)
    for words in (
        "nft is above base on 0 of 3 metrics",
        "some/model, float32",
        "4 euler steps",
        "+0.200",
        "[−0.230, +0.630]",
    ):
        assert words in text, words
    assert not {"NaN", "None", "nan"} & set(re.findall(r"\w+", text))


def test_texts_are_escaped(scored: Scored) -> None:
    folder = scored([Prompt("a <b> & c", "general")], {"base": {"x": column(0.5)}})
    write_results(folder)
    html = (folder.path / "report.html").read_text()
    parse(folder.path / "report.html")
    assert "a &lt;b&gt; &amp; c" in html
    assert "a <b>" not in html


def test_headlines(scored: Scored, prompts: list[Prompt]) -> None:
    rows = {
        "base": {"x": column(0.0, 0.1, 0.2)},
        "up": {"x": column(1.0, 1.1, 1.21)},
        "best": {"x": column(2.0, 2.0, 2.0)},
    }
    folder = scored(prompts, rows)
    assert headline(Results(folder, ["base"])) == "base on 1 metric"
    assert headline(Results(folder, ["base", "up"])) == "up is above base on 1 of 1 metric"
    assert headline(Results(folder, ["up", "base"])) == "base is above up on 0 of 1 metric"
    assert headline(Results(folder)) == "best ranks first of 3 models"


def test_cases_are_ranked_by_the_stated_gain(scored: Scored) -> None:
    prompts = [Prompt(f"prompt {i}", "general" if i % 2 else "ocr") for i in range(12)]
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(2, 2, 12))
    folder = scored(
        prompts,
        {
            "base": {"x": column(*before[0]), "y": column(*before[1][:6], *[None] * 6)},
            "nft": {"x": column(*after[0]), "y": column(*after[1])},
        },
    )
    results = Results(folder)
    found = {case.picture.prompt: case.gain for case in cases(results)}
    x = (after[0] - before[0]) / np.std(before[0], ddof=1)
    y = (after[1][:6] - before[1][:6]) / np.std(before[1][:6], ddof=1)
    assert found == pytest.approx({i: (x[i] + y[i]) / 2 if i < 6 else x[i] for i in range(12)})
    shown = [case.picture.prompt for case in first_of_each_source(results, cases(results))]
    assert shown == [0, 2, 4, 6, 1, 3, 5, 7]
    write_results(folder)
    html = (folder.path / "report.html").read_text()
    best = html.split("Largest gain of nft")[1].split("Smallest gain of nft")[0]
    order = [int(i) for i in re.findall(r"<figcaption>prompt (\d+)<", best)]
    assert order == sorted(found, key=lambda i: -found[i])[:4]


def test_large_pictures_are_reduced_and_pictures_that_one_lacks_left_out(scored: Scored, prompts: list[Prompt]) -> None:
    folder = scored(prompts, {"a": {"x": column(0.1, 0.2, 0.3)}, "b": {"x": column(0.1, 0.2, 0.3)}}, size=200)
    (folder.path / "models" / "b" / "images" / "000001-0.png").unlink()
    assert [case.picture.prompt for case in cases(Results(folder))] == [0, 2]
    write_results(folder)
    with Image.open(folder.path / "grid.png") as grid:
        assert grid.width < 500
    parse(folder.path / "report.html")


def test_histograms_have_common_bins_and_shares() -> None:
    svg = histogram({"a": [0.0, 1.0, 1.0, 1.0], "b": [0.5]}, {"a": "red", "b": "blue"}, "x & y")
    assert svg.count("<path") == 2
    assert "x &amp; y" in svg
    assert "nan" not in histogram({"a": [2.0, 2.0], "b": []}, {"a": "red", "b": "blue"}, "flat")
    assert "no data" in histogram({}, {}, "none")


def test_nothing_on_the_disk_but_what_the_folder_says(compared: EvaluationFolder, tmp_path: Path) -> None:
    write_results(compared)
    names = {str(path.relative_to(compared.path)) for path in compared.path.rglob("*") if path.is_file()}
    top = {"prompts.jsonl", "metrics.json", "results.json", "results.md", "grid.png", "report.html"}
    inside = re.compile(r"models/\w+/(manifest\.json|images/\d{6}-\d\.png|scores/\w+\.jsonl)")
    assert all(name in top or inside.fullmatch(name) for name in names)
    assert top <= names
