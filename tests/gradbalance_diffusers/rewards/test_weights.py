import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards import weights
from gradbalance_diffusers.rewards.weights import check_keys, find_file, read_weights

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(())}


class TestFindFile:
    def test_a_file_whatever_its_name(self, tmp_path):
        (tmp_path / "other.pt").touch()
        assert find_file(tmp_path / "other.pt", "weights.pt") == tmp_path / "other.pt"

    def test_a_folder_that_has_it(self, tmp_path):
        (tmp_path / "weights.pt").touch()
        assert find_file(str(tmp_path), "weights.pt") == tmp_path / "weights.pt"

    def test_a_folder_that_does_not(self, tmp_path):
        with pytest.raises(InvalidArgumentError, match=r"`head` must be .* a folder with 'weights.pt'.* without it"):
            find_file(tmp_path, "weights.pt", parameter="head")

    def test_a_path_that_is_not_here(self):
        with pytest.raises(InvalidArgumentError, match=r"`path` .* the file 'weights.pt'.*'/no/such.pt'.*no hub id"):
            find_file("/no/such.pt", "weights.pt")

    def test_a_hub_id_without_network(self):
        with pytest.raises(InvalidArgumentError) as caught:
            find_file("xswu/HPSv2", "HPS_v2.1_compressed.pt")
        for part in (
            "'HPS_v2.1_compressed.pt'",
            "'xswu/HPSv2'",
            "HF_HUB_OFFLINE=1",
            "hf download xswu/HPSv2 HPS_v2.1_compressed.pt ",
        ):
            assert part in str(caught.value)

    def test_a_hub_id_with_network(self, monkeypatch):
        asked = []
        monkeypatch.setattr(
            weights, "hf_hub_download", lambda *names, **options: asked.append((names, options)) or "/cache/w.pt"
        )
        assert find_file("some/model", "w.pt", revision="v1") == Path("/cache/w.pt")
        assert asked == [(("some/model", "w.pt"), {"revision": "v1"})]


class TestReadWeights:
    @pytest.mark.parametrize("content", [TENSORS, {"state_dict": TENSORS, "epoch": 3, "name": "x"}])
    def test_torch_files(self, tmp_path, content):
        torch.save(content, tmp_path / "w.pt")
        torch.testing.assert_close(read_weights(tmp_path / "w.pt"), TENSORS)

    def test_safetensors(self, tmp_path):
        save_file(TENSORS, tmp_path / "w.safetensors")
        torch.testing.assert_close(read_weights(tmp_path / "w.safetensors"), TENSORS)

    def test_a_file_that_would_run_code_is_refused(self, tmp_path):
        mark = tmp_path / "executed"

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(mark),)

        torch.save({"state_dict": TENSORS, "note": Evil()}, tmp_path / "w.pt")
        with pytest.raises(InvalidArgumentError, match=r"`head` must be .* cannot run code"):
            read_weights(tmp_path / "w.pt", parameter="head")
        assert not mark.exists()
        torch.load(tmp_path / "w.pt", weights_only=False)
        assert mark.exists()  # the file was a real danger

    @pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
    @pytest.mark.parametrize("content", [b"", b"not weights at all", b"<html>404</html>" * 100])
    def test_a_file_of_something_else(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=re.escape(repr(str(tmp_path / name)))):
            read_weights(tmp_path / name)

    @pytest.mark.parametrize("content", [[1, 2], torch.ones(2), {"a": 1}, {"state_dict": {"a": [1]}}])
    def test_a_file_without_named_tensors(self, tmp_path, content):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(InvalidArgumentError, match="must hold named tensors"):
            read_weights(tmp_path / "w.pt")


def test_keys_that_differ_are_counted_and_the_first_are_named():
    check_keys({"a", "b"}, {"b", "a"}, file=Path("w.pt"), layout="x")
    expected = {f"k{i}" for i in range(7)}
    with pytest.raises(InvalidArgumentError) as caught:
        check_keys({"z", "k6"}, expected, file=Path("w.pt"), layout="a net", parameter="head")
    assert str(caught.value) == (
        "`head` must hold the tensors of a net, each once and no others. Found 'w.pt' with 6 missing "
        "(k0, k1, k2, k3, k4, ...) and 1 unknown (z)."
    )
