from dataclasses import asdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.assembly import load_rewards
from gradbalance_diffusers.config import PRESETS, Config, OptimizerConfig, load_config
from gradbalance_diffusers.schema import Section, field_docs, known_paths, type_hints
from gradbalance_diffusers.yaml_format import dump_yaml, parse_yaml


def sections() -> list[type[Section]]:
    found, queue = [], [Config]
    while queue:
        cls = queue.pop()
        found.append(cls)
        for hint in type_hints(cls).values():
            inner = next(iter(getattr(hint, "__args__", ())), hint)
            queue += [c for c in (hint, inner) if isinstance(c, type) and issubclass(c, Section) and c not in found]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_every_field_has_a_docstring(cls):
    assert len(sections()) == 14
    assert [name for name, text in field_docs(cls).items() if not text] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_round_trip(preset):
    config = load_config(preset)
    again = Config.from_yaml(config.to_yaml())
    assert again == config
    assert again.fingerprint() == config.fingerprint()


def test_presets_hold_the_published_recipe():
    paper = load_config("sd35-medium")
    assert (paper.model.lora_rank, paper.model.lora_alpha) == (32, 64)
    assert (paper.prompts.groups_per_epoch, paper.prompts.images_per_prompt) == (48, 24)
    assert (paper.balance.method, paper.balance.interval, paper.balance.ema_decay) == ("marble", 10, 0.7)
    assert (paper.old_policy.slope, paper.old_policy.cap) == (0.001, 0.95)
    assert (paper.optimizer.lr, paper.loss.guidance_beta, paper.loss.kl_weight) == (3e-4, 0.1, 1e-4)
    assert paper.reward_names == ["pickscore", "hpsv2", "clipscore", "ocr", "geneval"]
    assert load_config("tiny").reward_names == ["saturation", "contrast", "background", "ocr", "geneval"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=1e-3", {"optimizer": {"lr": 1e-3}}),
        ("prompts.mix.ocr=7", {"prompts": {"mix": {"ocr": 7.0}}}),
        ("run.threads=null", {"run": {"threads": None}}),
        ("run.mixed_precision=no", {"run": {"mixed_precision": "no"}}),
        ("optimizer.betas=[0, 0.5]", {"optimizer": {"betas": (0.0, 0.5)}}),
        ("loss.center=false", {"loss": {"center": False}}),
    ],
)
def test_overrides(override, expected):
    ((section, fields),) = expected.items()
    ((name, value),) = fields.items()
    found = asdict(load_config("tiny", [override]))[section][name]
    assert {**found, **value} == found if isinstance(value, dict) else found == value


def test_rewards_are_overridden_by_bare_names():
    config = load_config("tiny", ["rewards=[ocr, {name: 'my.module:score', options: {size: 3}}]"])
    assert config.reward_names == ["ocr", "my.module:score"]
    assert config.rewards[1].options == {"size": 3}
    assert [reward.scorer for reward in config.rewards] == ["ocr", "my.module:score"]


def test_one_kind_of_reward_under_several_names():
    rewards = "rewards=[{name: signs, kind: ocr}, {name: signs-2, kind: ocr, options: {threads: 2}}]"
    config = load_config("tiny", [rewards, "stages=[{name: a, epochs: 40, rewards: [signs-2]}]"])
    assert config.reward_names == ["signs", "signs-2"]
    assert [reward.scorer for reward in config.rewards] == ["ocr", "ocr"]
    assert load_rewards(config).names == ("signs", "signs-2")
    with pytest.raises(InvalidArgumentError, match="each once"):
        load_config("tiny", ["rewards=[ocr, {name: ocr, kind: saturation}]"])


def test_the_kind_of_a_reward_is_frozen_unless_it_is_the_name():
    def frozen(rewards: str) -> object:
        return load_config("tiny", [f"rewards={rewards}"]).frozen_values()["rewards"]

    before_kinds = [{"name": "ocr", "options": {}}]
    assert frozen("[ocr]") == frozen("[{name: ocr, kind: ocr}]") == frozen("[{name: ocr, kind: null}]") == before_kinds
    assert frozen("[{name: ocr, kind: contrast}]") == [{"name": "ocr", "kind": "contrast", "options": {}}]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learningrate=1", ["`optimizer.learningrate`", "not a known key", "lr"]),
        ("optimizer.weightdecay=1", ["Did you mean `optimizer.weight_decay`"]),
        ("lr=1e-3", ["Did you mean `optimizer.lr`"]),
        ("optimizr.lr=1", ["`optimizr`", "Did you mean `optimizer`"]),
        ("optimizer.lr=fast", ["`optimizer.lr`", "a number > 0", "'fast' (str)"]),
        ("optimizer.lr=-1", ["`optimizer.lr`", "a number > 0", "-1"]),
        ("optimizer.lr=.inf", ["`optimizer.lr`", "inf"]),
        ("optimizer.lr=true", ["`optimizer.lr`", "True (bool)"]),
        ("run.epochs=2.5", ["`run.epochs`", "a whole number >= 1", "2.5"]),
        ("run.epochs=null", ["`run.epochs`", "null"]),
        ("balance.method=marbel", ["`balance.method`", "Did you mean 'marble'"]),
        ("balance.ema_decay=1.0", ["`balance.ema_decay`", ">= 0 and < 1"]),
        ("optimizer.betas=[0.9]", ["`optimizer.betas`", "a list of 2"]),
        ("optimizer.betas=[0.9, 1.5]", ["`optimizer.betas[1]`"]),
        ("prompts.mix={ocr: 1, poems: 2}", ["`prompts.mix (key)`", "'poems'"]),
        ("prompts.sources={general: tiny}", ["`prompts.mix`", "geneval", "ocr"]),
        ("rewards=[ocr, ocr]", ["`rewards`", "each once"]),
        ("rewards=[]", ["`rewards`", "no reward"]),
        ("rewards=[{nam: ocr}]", ["`rewards[0].nam`", "`rewards[0].name`"]),
        ("rewards.options=1", ["rewards.options", "as a whole"]),
        ("timesteps.low=1", ["`timesteps.low`", "`timesteps.high`"]),
        ("timesteps={mode: grid, per_image: 9}", ["`timesteps.per_image`", "= 7"]),
        ("balance.floor=0.3", ["`balance.floor`", "1.5", "0.2"]),
        ("balance.reward_weights={ocr: 2}", ["weighted-sum"]),
        ("balance={method: weighted-sum, reward_weights: {ocrr: 2}}", ["`balance.reward_weights`", "ocrr"]),
        ("balance.preference={ocrr: 2}", ["`balance.preference`", "ocrr"]),
        (
            "balance={method: nash, preference: {ocr: 2}}",
            ["`balance.preference`", "marble | mgda | mgda-raw", "'nash'"],
        ),
        ("balance.preference={ocr: 0}", ["`balance.preference.ocr`", "> 0"]),
        ("model.dtype=float16", ["`run.mixed_precision`", "must be fp16", "float16", "'no'"]),
        ("run.mixed_precision=fp8", ["`run.mixed_precision`", "'no', 'bf16', 'fp16'"]),
        ("optimizer.steps_per_epoch=25", ["`optimizer.steps_per_epoch`", "24 groups"]),
        ("prompts.images_per_prompt=1", ["`prompts.images_per_prompt`"]),
        ("stages=[{name: a, epochs: 3}]", ["`run.epochs`", "run.epochs=3"]),
        ("stages=[{name: a, epochs: 60, rewards: [poem]}]", ["`stages[0].rewards`", "poem"]),
        ("stages=[{name: a, epochs: 60, rewards: []}]", ["`stages[0].rewards`", "empty"]),
        ("stages=[{epochs: 60}]", ["`stages[0].name`", "missing"]),
        ("stages=[{name: a, epochs: 60, mix: {}}]", ["`stages[0].mix`", "empty mix"]),
        ("optimizer.lr", ["section.key=value"]),
        ("optimizer..lr=1", ["section.key=value"]),
        ("optimizer=3", ["`optimizer` must be a mapping of"]),
        ("optimizer.lr=[1", ["not valid YAML", "override"]),
    ],
)
def test_bad_values_are_refused_with_their_path(override, words):
    with pytest.raises(InvalidArgumentError) as caught:
        load_config("tiny", [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.dtype=bfloat16", "run.mixed_precision=fp16"], "`model.dtype: bfloat16`"),
        (["run.mixed_precision=fp16", "optimizer.on_nonfinite=skip"], "`optimizer.on_nonfinite` must be 'raise'"),
    ],
)
def test_precisions_that_do_not_go_together_are_refused(overrides, words):
    with pytest.raises(InvalidArgumentError, match=words):
        load_config("tiny", overrides)


def test_sections_are_checked_when_built_by_hand():
    assert OptimizerConfig(lr=1).lr == 1.0
    with pytest.raises(InvalidArgumentError, match=r"`optimizer\.lr` must be a number > 0"):
        OptimizerConfig(lr=0)


def test_unknown_preset_and_missing_file_are_refused(tmp_path):
    for name in ("sd35", str(tmp_path / "absent.yaml"), str(tmp_path)):
        with pytest.raises(InvalidArgumentError, match="tiny, sd35-medium"):
            load_config(name)


def test_a_file_may_leave_out_what_has_a_default(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(
        "model: {path: tiny}\nprompts: {sources: {ocr: tiny}, mix: {ocr: 1}}\nrewards: [ocr]\n"
        "evaluation: {sources: {ocr: tiny}}\n"
    )
    assert load_config(path).optimizer == OptimizerConfig()
    path.write_text("rewards: [ocr]\n")
    with pytest.raises(InvalidArgumentError, match="`model` is missing"):
        load_config(path)
    path.write_text("")
    with pytest.raises(InvalidArgumentError, match="must be a mapping"):
        load_config(path)
    path.write_text("run: {seed: 1}\nrun: {seed: 2}\n")
    with pytest.raises(InvalidArgumentError, match=r"short.yaml, line 2, column 1.*'run' stands twice"):
        load_config(path)


def test_fingerprint_changes_with_training_but_not_with_length_or_place():
    base = load_config("tiny")
    same = load_config("tiny", ["run.epochs=99", "run.folder=x", "evaluation.every=3", "run.threads=1"])
    assert same.fingerprint() == base.fingerprint()
    other = load_config("tiny", ["optimizer.lr=1e-3", "prompts.mix.ocr=9"])
    assert other.fingerprint() != base.fingerprint()
    differing = {k for k, v in other.frozen_values().items() if base.frozen_values()[k] != v}
    assert differing == {"optimizer.lr", "prompts.mix.ocr"}


def test_metrics_are_the_training_rewards_unless_named():
    assert load_config("tiny").metrics == load_config("tiny").rewards
    metrics = load_config("tiny", ["evaluation.metrics=[ocr, {name: strict, kind: geneval}]"]).metrics
    assert [(metric.name, metric.scorer) for metric in metrics] == [("ocr", "ocr"), ("strict", "geneval")]
    with pytest.raises(InvalidArgumentError, match=r"`evaluation\.metrics` must name each metric once"):
        load_config("tiny", ["evaluation.metrics=[ocr, ocr]"])


def test_devices_of_rewards_and_what_their_failures_do_are_free_on_resume():
    rewards = "rewards=[{{name: ocr, on_error: {}, options: {{device: {}, size: {}}}}}]"
    here, there, other = (
        load_config("tiny", [rewards.format(*values)]).frozen_values()
        for values in (("raise", "cpu", 1), ("mask", "cuda", 1), ("raise", "cpu", 2))
    )
    assert here == there
    assert here != other


def test_keys_free_on_resume_exist():
    frozen = set(load_config("tiny").frozen_values())
    free = {path for path in known_paths(Config) if not any(k == path or k.startswith(path + ".") for k in frozen)}
    assert free == {
        "model.device",
        "model.text_encoders",
        "model.cached_prompts",
        "evaluation.every",
        "evaluation.metrics",
        "run.epochs",
        "run.folder",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.report_every",
        "run.threads",
        "run.reward_threads",
        "run.reward_timeout",
        "run.timeout",
        "run.trackers",
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@example(["\x85", {"a\u2028b": "\u2029"}])  # line breaks other than \n
def test_yaml_round_trip_is_exact(value):
    again = parse_yaml(dump_yaml(value), "test")
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1E3", 1e3), (".5", 0.5), ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("010", 10), ("~", None)],
)
def test_yaml_scalars_follow_version_1_2(text, value):
    assert parse_yaml(text, "test") == value
