import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

from gradbalance.errors import StateError
from gradbalance_diffusers import checkpoint as module
from gradbalance_diffusers.checkpoint import CheckpointState, latest_checkpoint, load_checkpoint, save_checkpoint
from gradbalance_diffusers.packing import pack, unpack

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2**62, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | TENSORS
KEYS = st.text(max_size=4) | st.integers(-3, 3) | st.sampled_from(["$tensor", "$dict", "0", "1", "a/b", "a"])
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.fixed_dictionaries({"$tuple": inner})
    ),
    max_leaves=12,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


@given(STATES)
def test_pack_and_unpack_are_exact_through_safetensors_and_json(state):
    tensors, values = pack(state)
    text = json.dumps(values, allow_nan=False)
    assert same(unpack(load(save(tensors)), json.loads(text)), state)


def test_random_states_survive():
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    tensors, values = pack(state)
    assert same(unpack(load(save(tensors)), json.loads(json.dumps(values))), state)


def test_an_optimizer_continues_bit_for_bit(tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}], lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(model, optimizer, scheduler, steps):
        for _ in range(steps):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, 3)
    values = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if not k.startswith("_get")},
        "rng": torch.get_rng_state(),
    }
    save_checkpoint(tmp_path, 3, CheckpointState(values), save_lora=write_lora)
    train(model, optimizer, scheduler, 3)

    again, optimizer_again, scheduler_again = build()
    loaded = load_checkpoint(tmp_path / "step-000003").values
    again.load_state_dict(loaded["model"])
    optimizer_again.load_state_dict(loaded["optimizer"])
    scheduler_again.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"])
    train(again, optimizer_again, scheduler_again, 3)
    assert torch.equal(again.weight, model.weight)
    assert same(optimizer_again.state_dict(), optimizer.state_dict())


def test_tensors_that_share_memory_or_have_strides_are_saved():
    base = torch.arange(6.0).reshape(2, 3)
    tensors, values = pack({"a": base, "b": base, "t": base.t(), "p": torch.nn.Parameter(base)})
    loaded = unpack(load(save(tensors)), values)
    assert all(torch.equal(loaded[key], base) for key in "abp")
    assert torch.equal(loaded["t"], base.t())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [np.float64(1.0)]}, "float64 at a/0"),
        ({"a": {1, 2}}, "set at a"),
        ({(1, 2): 3}, r"Found \(1, 2\) \(tuple\) at its root"),
        ({True: 3}, "bool"),
        (torch.float32, "dtype at its root"),
    ],
)
def test_what_cannot_be_saved_exactly_is_refused_with_its_path(state, words):
    with pytest.raises(StateError, match=words):
        pack(state)


def write_lora(folder, role):
    save_file({"w": torch.full((2,), float(len(role)))}, folder / "pytorch_lora_weights.safetensors")


def save_one(folder, step, *, keep=3, config=None, values=None):
    state = CheckpointState(values or {"epoch": step, "moment": torch.ones(3) * step}, config or {"optimizer.lr": 1e-3})
    return save_checkpoint(folder, step, state, save_lora=write_lora, keep=keep)


def test_layout_round_trip_and_pruning(tmp_path):
    for step in (1, 2, 999_999, 1_000_000):
        save_one(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-1000000"
    files = sorted(p.relative_to(newest).as_posix() for p in newest.rglob("*") if p.is_file())
    lora = "pytorch_lora_weights.safetensors"
    assert files == [f"default/{lora}", "manifest.json", f"old/{lora}", "state.json", "tensors.safetensors"]
    loaded = load_checkpoint(newest, config={"optimizer.lr": 1e-3})
    assert loaded.step == 1_000_000
    assert same(loaded.values, {"epoch": 1_000_000, "moment": torch.ones(3) * 1_000_000})
    assert loaded.lora == {"default": newest / "default", "old": newest / "old"}


def test_no_checkpoint_yet(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None


def test_a_state_without_tensors(tmp_path):
    path = save_one(tmp_path, 1, values={"epoch": 1})
    assert load_checkpoint(path).values == {"epoch": 1}


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "flipped": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
}
FILES = ["default/pytorch_lora_weights.safetensors", "tensors.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(tmp_path, name, damage):
    save_one(tmp_path, 1)
    path = save_one(tmp_path, 2)
    DAMAGES[damage](path / name)
    with pytest.raises(StateError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert name in str(caught.value)
    with pytest.warns(UserWarning, match="Skipping the damaged checkpoint .*step-000002"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    DAMAGES[damage](tmp_path / "step-000001" / name)
    with pytest.raises(StateError, match="Every checkpoint"), pytest.warns(UserWarning, match="Skipping"):
        latest_checkpoint(tmp_path)


def test_another_configuration_is_refused_with_the_differing_keys(tmp_path):
    path = save_one(tmp_path, 1, config={"optimizer.lr": 1e-3, "rewards": ["ocr"], "seed": 0})
    wanted = {"optimizer.lr": 2e-3, "rewards": ("ocr",), "loss.center": True, "seed": 0}
    with pytest.raises(StateError) as caught:
        load_checkpoint(path, config=wanted)
    message = str(caught.value)
    assert "optimizer.lr: 0.001 there, 0.002 here" in message
    assert "loss.center: 'absent' there, True here" in message
    assert "rewards" not in message
    assert "seed" not in message


def test_a_crash_while_saving_leaves_the_older_checkpoint_and_no_half(tmp_path, monkeypatch):
    save_one(tmp_path, 1, keep=1)

    def crash(*_):
        raise KeyboardInterrupt

    for name in ("save_file", "_facts", "_flush"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, crash)
            with pytest.raises(KeyboardInterrupt):
                save_one(tmp_path, 2, keep=1)
        assert [p.name for p in tmp_path.glob("[!.]*")] == ["step-000001"]
        assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    save_one(tmp_path, 2, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path):
    save_one(tmp_path, 1, keep=1)
    with pytest.raises(StateError, match="set"):
        save_one(tmp_path, 2, keep=1, values={"bad": {1}})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_the_checkpoint_of_the_same_step_is_replaced(tmp_path):
    path = save_one(tmp_path, 1)
    shutil.rmtree(path / "old")
    assert save_one(tmp_path, 1, values={"epoch": 7}) == path
    assert load_checkpoint(path).values == {"epoch": 7}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 2)
    path = save_one(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(StateError, match="format 2"):
        load_checkpoint(path)
