import base64
import io
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import gradbalance as gb
from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.charts import Series, dumbbell, line_chart, log_ticks, nice_ticks
from gradbalance_diffusers.config import load_config
from gradbalance_diffusers.report import headline, write_report
from gradbalance_diffusers.report_data import read_run, running_mean, thinned
from gradbalance_diffusers.report_pictures import cases
from gradbalance_diffusers.run_folder import RunFolder
from gradbalance_diffusers.training_log import measured
from html_page import parse

NAMES = ["saturation", "contrast", "background", "ocr", "geneval"]
START = {"saturation": 0.31, "contrast": 0.42, "background": 0.55, "ocr": 0.56, "geneval": 0.74}
END = {"saturation": 0.40, "contrast": 0.51, "background": 0.74, "ocr": 0.82, "geneval": 0.78}
SPECIALIST = {"ocr": "ocr", "geneval": "geneval"}


def synthetic_run(path, epochs=60, evaluated=(0, 20, 40, 60), seed=0):
    """A run folder whose numbers look like a real one; the shapes of the rows are those of the trainer."""
    rng = np.random.default_rng(seed)
    config = load_config("tiny", [f"run.epochs={epochs}", "evaluation.saved_images=8"])
    with RunFolder(path, overwrite=True) as folder:
        folder.write_config(config)
        for epoch in range(epochs + 1):
            if epoch in evaluated:
                evaluate(folder, config, epoch, epochs, rng)
            if epoch < epochs:
                folder.log(train_row(epoch, epochs, rng))
                folder.log_timing({"epoch": epoch, "sampling": 2.0, "training": 3.5})
    return path


def level(name, progress):
    return START[name] + (END[name] - START[name]) * (1 - math.exp(-2.5 * progress)) / (1 - math.exp(-2.5))


def train_row(epoch, epochs, rng):
    refreshed = epoch % 8 == 0
    alpha = rng.dirichlet([3, 3, 2, 5, 6])
    norms = dict(zip(NAMES, rng.lognormal([0.2, 0.0, 0.5, -1.0, -0.7], 0.2).tolist(), strict=True))
    pairs = {f"{a}|{b}": float(rng.normal(0.1, 0.3)) for i, a in enumerate(NAMES) for b in NAMES[i + 1 :]}
    return {
        "kind": "train",
        "epoch": epoch,
        "step": epoch + 1,
        "stage": "all",
        "rewards": {
            n: None if n == "ocr" and epoch == 7 else level(n, epoch / epochs) + rng.normal(0, 0.03) for n in NAMES
        },
        "reward_std": dict.fromkeys(NAMES, 0.2),
        "valid": {n: 72 if n in SPECIALIST else 192 for n in NAMES},
        "masked_errors": {"ocr": 1} if epoch == 3 else {},
        "loss": 0.8 + 0.1 * rng.normal(),
        "kl": 0.0,
        "grad_norm": float(rng.lognormal(0, 0.3)),
        "lr": 2e-3 * (0.55 + 0.45 * math.cos(math.pi * epoch / epochs)),
        "old_decay": 0.3,
        "weights": {n: float(a / norms[n]) for n, a in zip(NAMES, alpha, strict=True)},
        "coefficients": dict(zip(NAMES, alpha.tolist(), strict=True)) if refreshed else None,
        "norms": norms if refreshed else None,
        "refreshed": refreshed,
        "collector": "linear",
        "cosines": {n: 0.4 + 0.05 * rng.normal() for n in NAMES} if refreshed else None,
        "conflicts": pairs if refreshed else None,
        "expected": expected(1 + epoch // 8, rng) if refreshed and epoch else None,
        "inactive": ["geneval"] if epoch == 5 else [],
        "degenerate_groups": {"ocr": 2, "geneval": 3},
    }


def expected(batches, rng):
    """What a conflict meter logs, from one that has seen as many batches."""
    meter, means = gb.ConflictMeter(groups=8), rng.normal(size=(5, 40))
    means[1] -= means[0]
    means[4] = 0.02 * means[4]
    for _ in range(batches):
        meter.update(torch.tensor(means + 2 * rng.normal(size=(5, 40))), NAMES)
    return measured(meter)


def evaluate(folder, config, epoch, epochs, rng):
    generator = torch.Generator().manual_seed(epoch)
    noise = np.random.default_rng(9).normal(size=(48, len(NAMES)))
    prompts, images = [], {}
    for i in range(48):
        source = ("general", "ocr", "geneval")[i % 3]
        scores = {}
        for k, name in enumerate(NAMES):
            value = level(name, epoch / epochs) + 0.15 * noise[i, k] + 0.05 * rng.normal()
            scores[name] = None if SPECIALIST.get(name, source) != source else float(np.clip(value, 0, 1))
        prompts.append({"prompt": f'{source} prompt <{i}> says "4{i}"', "source": source, "scores": scores})
    grid = [i for i in range(48) if i // 3 < config.evaluation.saved_images]
    for i in grid:
        image = torch.rand(3, 1, 1, generator=generator).expand(3, 32, 32).clone()
        image[:, 8:24, 8 : 12 + i % 16] = torch.rand(3, 1, 1, generator=generator)
        images[i] = image
    record = {"epoch": epoch, "prompts": prompts, "grid": grid}
    first = folder.load_evaluation(0) or record
    folder.save_evaluation(record, images)
    rows = {name: [p["scores"][name] for p in prompts if p["scores"][name] is not None] for name in NAMES}
    base = {name: [p["scores"][name] for p in first["prompts"] if p["scores"][name] is not None] for name in NAMES}
    change = {name: facts(np.subtract(rows[name], base[name])) for name in NAMES} if epoch else None
    folder.log(
        {
            "kind": "eval",
            "epoch": epoch,
            "step": epoch,
            "rewards": {n: facts(v) for n, v in rows.items()},
            "change": change,
        }
    )


def facts(values):
    return {"mean": float(np.mean(values)), "se": float(np.std(values, ddof=1) / len(values) ** 0.5), "n": len(values)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("runs") / "demo")


def test_the_page_is_whole_and_needs_no_network(run):
    path = write_report(run)
    assert path == run / "report.html"
    page = parse(path)
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.links) == 2 * 24
    assert not re.search(r"https?://|@import|<script", path.read_text("utf-8"))
    text = " ".join(page.text)
    assert "NaN" not in text
    for words in (
        "Four of five rewards rose",
        "60 of 60",
        "6 min",
        "24 prompts × 8",
        "opposed at least one",
        "guidance_beta",
    ):
        assert words in text, words


def test_numbers_on_the_page_are_those_of_the_evaluation(run):
    last = read_run(run).evaluations[-1]
    html = write_report(run).read_text("utf-8")
    for name in NAMES:
        change = last["change"][name]
        assert f'+{change["mean"]:.3f}</span> <span class="error">± {change["se"]:.3f}' in html
        assert f"<td>{last['rewards'][name]['mean']:.3f}</td>" in html


def test_what_was_left_out_is_counted(run):
    html = write_report(run).read_text("utf-8")
    row = html.split("What was left out")[1].split('<span class="name">ocr</span>')[1].split("</tr>")[0]
    assert re.findall(r"<td>([^<]*)</td>", row) == ["72.0", "1", "120", "0"]


def conflicts_of(path):
    return write_report(path).read_text("utf-8").partition("Do the rewards conflict?")[2].partition("<h2>")[0]


def test_conflicts_are_those_of_the_last_refresh(run):
    html = conflicts_of(run)
    last = [row for row in read_run(run).train if row["expected"]][-1]["expected"]
    assert last["batches"] == 8
    verdicts = Counter(pair["verdict"] for pair in last["pairs"])
    assert len(verdicts) > 1
    assert f"Of 10 pairs of rewards <b>{verdicts['conflict']}</b> conflict" in html
    assert f"<b>{verdicts['not yet known']}</b> it is not yet known" in html
    assert "the batches of 8 refreshes:" in html
    assert "which takes more of them after few refreshes" in html
    for pair in last["pairs"]:
        if pair["cosine"] is not None:
            number = f"{abs(pair['cosine']):.2f}"
            assert re.search(rf"[+−]{number} <span class=\"error\">± {pair['error']:.2f}", html), pair
    assert html.count('<td class="unknown">') == sum(
        pair["verdict"] == "not yet known" and pair["cosine"] is not None for pair in last["pairs"]
    )


def test_cosines_that_noise_hides_are_said_to_be(tmp_path):
    rng = np.random.default_rng(3)
    with RunFolder(tmp_path) as folder:
        folder.write_config(load_config("tiny", ["loss.center=false"]))
        for epoch in (0, 8):
            row = train_row(epoch, 16, rng)
            if epoch:
                row["expected"]["pairs"][0] |= {"cosine": math.nan, "error": math.nan, "verdict": "not yet known"}
            folder.log(row)
    html = conflicts_of(tmp_path)
    assert "noise hides it" in html
    assert "make" in html
    assert "loss.center: false" in html
    assert "nan" not in html


def test_in_batch_cosines_are_shown_as_what_they_are_without_a_meter(tmp_path):
    rng = np.random.default_rng(0)
    with RunFolder(tmp_path) as folder:
        folder.write_config(load_config("tiny", ["balance.measure_conflicts=false"]))
        for epoch in range(9):
            folder.log(train_row(epoch, 9, rng) | {"expected": None})
    html = conflicts_of(tmp_path)
    assert "This does not answer the question" in html
    assert "balance.measure_conflicts: true" in html
    assert html.count("<td style=") == 10


def test_prompts_are_escaped(run):
    html = write_report(run).read_text("utf-8")
    assert "prompt &lt;0&gt;" in html
    assert "prompt <0>" not in html


def test_cases_are_ordered_by_the_stated_gain(run):
    data = read_run(run)
    found = cases(data)
    assert len(found) == 24
    assert [c.gain for c in found] == sorted((c.gain for c in found), reverse=True)
    first = data.scores(data.evaluations[0])
    case = found[0]
    expected = []
    for name in NAMES:
        if case.before[name] is not None:
            values = [p["scores"][name] for p in first["prompts"] if p["scores"][name] is not None]
            expected.append((case.after[name] - case.before[name]) / np.std(values, ddof=1))
    assert case.gain == pytest.approx(np.mean(expected))


def test_large_pictures_are_reduced_and_small_ones_kept_as_they_are(tmp_path):
    synthetic_run(tmp_path, epochs=2, evaluated=(0, 2))
    Image.new("RGB", (640, 480)).save(tmp_path / "evaluations" / "epoch-0000" / "000.png")
    links = parse(write_report(tmp_path)).links
    contents = [base64.b64decode(link.partition(",")[2]) for link in links]
    sizes = Counter(Image.open(io.BytesIO(content)).size for content in contents)
    assert sizes == {(320, 240): 1, (32, 32): 47}
    assert (tmp_path / "evaluations" / "epoch-0002" / "000.png").read_bytes() in contents


def test_a_picture_that_is_gone_leaves_its_case_out(tmp_path):
    synthetic_run(tmp_path, epochs=2, evaluated=(0, 2))
    (tmp_path / "evaluations" / "epoch-0000" / "000.png").unlink()
    assert len(cases(read_run(tmp_path))) == 23
    (tmp_path / "evaluations" / "epoch-0002.json").unlink()
    assert cases(read_run(tmp_path)) == []
    parse(write_report(tmp_path))


@pytest.mark.parametrize(("epochs", "evaluated"), [(0, ()), (0, (0,)), (1, (0,)), (3, (0, 3)), (3, ())])
def test_a_run_that_has_just_begun_has_a_report_too(tmp_path, epochs, evaluated):
    synthetic_run(tmp_path, epochs=max(1, epochs), evaluated=())
    config = load_config("tiny", ["run.epochs=50"])
    with RunFolder(tmp_path, overwrite=True) as folder:
        folder.write_config(config)
        rng = np.random.default_rng(0)
        for epoch in range(epochs + 1):
            if epoch in evaluated:
                evaluate(folder, config, epoch, max(1, epochs), rng)
            if epoch < epochs:
                folder.log(train_row(epoch, epochs, rng))
    parse(write_report(tmp_path))


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    synthetic_run(tmp_path, epochs=2, evaluated=())
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "tra')
    assert read_run(tmp_path).epochs_done == 2
    parse(write_report(tmp_path))


def test_scalar_baseline_and_stages_are_shown(tmp_path):
    stages = "stages=[{name: first, epochs: 2, rewards: [ocr]}, {name: 'second <b>', epochs: 2, method: weighted-sum}]"
    rng = np.random.default_rng(0)
    with RunFolder(tmp_path) as folder:
        folder.write_config(load_config("tiny", ["run.epochs=4", stages]))
        for epoch in range(4):
            row = train_row(epoch, 4, rng)
            name = "ocr" if epoch < 2 else "sum"
            row |= {"stage": "first" if epoch < 2 else "second <b>", "weights": {name: 1.0}, "refreshed": False}
            folder.log(row | dict.fromkeys(["coefficients", "norms", "cosines", "conflicts"]))
    html = write_report(tmp_path).read_text("utf-8")
    parse(tmp_path / "report.html")
    assert "second &lt;b&gt;" in html
    assert "marble → weighted-sum" in html


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"no config\.yaml"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": (0.2, 0.05), "b": (0.1, 0.06)}, "One of two rewards rose"),
        ({"a": (0.2, 0.05), "b": (0.2, 0.1)}, "Both rewards rose"),
        ({"a": (-0.2, 0.05), "b": (0.0, 0.0)}, "None of two rewards rose"),
        ({"a": (0.2, 0.05)}, "The reward rose"),
        ({"a": (0.2, None)}, "Training on one reward"),
        (None, "Training on one reward"),
    ],
)
def test_headline_counts_clear_rises_only(tmp_path, changes, words):
    names = list(changes or {"a": 0})
    rewards = f"rewards=[{', '.join(names)}]"
    with RunFolder(tmp_path) as folder:
        folder.write_config(load_config("tiny", [rewards]))
        change = changes and {n: {"mean": m, "se": s, "n": 9} for n, (m, s) in changes.items()}
        folder.log({"kind": "eval", "epoch": 1, "step": 1, "rewards": {}, "change": change})
    assert headline(read_run(tmp_path)).startswith(words)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low, span):
    high = low + span
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 5
    tolerance = 1e-6 * max(abs(low), abs(high), span)
    assert all(low - tolerance <= tick <= high + tolerance for tick in ticks)


@given(st.floats(1e-9, 1e6), st.floats(1.3, 1e9))
def test_log_ticks_lie_inside(low, ratio):
    ticks = log_ticks(low, low * ratio)
    assert all(low <= tick <= low * ratio for tick in ticks)
    assert len(ticks) <= 6


@given(st.lists(st.none() | st.floats(-10, 10), max_size=40), st.integers(0, 6).map(lambda n: 2 * n + 1))
def test_running_mean_stays_between_its_values_and_keeps_constants(ys, window):
    points = list(enumerate(ys))
    known = [(x, y) for x, y in points if y is not None]
    smooth = running_mean(points, window)
    assert [x for x, _ in smooth] == [x for x, _ in known]
    assert all(min(y for _, y in known) - 1e-9 <= y <= max(y for _, y in known) + 1e-9 for _, y in smooth)
    assert running_mean(points, 1) == known


@given(st.integers(0, 5000), st.integers(1, 500))
def test_thinning_keeps_the_last_point_and_the_order(count, most):
    points = [(x, 0.0) for x in range(count)]
    kept = thinned(points, most)
    assert len(kept) <= most
    assert kept == sorted(kept)
    assert kept[-1:] == points[-1:]


NUMBERS = st.none() | st.floats(-1e9, 1e9) | st.just(math.nan)


@given(st.lists(NUMBERS, max_size=12), st.booleans(), st.booleans())
def test_charts_never_hold_what_a_browser_cannot_read(ys, log, zero):
    points = list(enumerate(ys))
    errors = [0.1] * len(points)
    series = [
        Series("a<b", points, "red"),
        Series("c", points, "red", "step"),
        Series("", points, "red", "dots", errors),
    ]
    svg = line_chart(series, title="x & y", log=log, zero=zero, marks=[(0, "s")])
    assert "nan" not in svg.replace("NaN", "nan").replace("no data", "")
    assert "inf" not in svg
    assert "a<b" not in svg


def test_dumbbell_places_both_ends():
    svg = dumbbell(0.25, 0.75, 0.1, "red", 0.0, 1.0, width=116)
    assert re.findall(r'cx="([\d.]+)"', svg) == ["33.0", "83.0"]
    assert json.dumps("0.25 to 0.75") in svg
