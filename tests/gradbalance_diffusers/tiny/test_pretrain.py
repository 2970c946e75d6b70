import pytest
import torch

from gradbalance_diffusers.tiny.evaluate import sample_rows
from gradbalance_diffusers.tiny.pretrain import main
from gradbalance_diffusers.tiny.prompts import tiny_prompts

ARGUMENTS = {
    "vae-steps": 2,
    "steps": 2,
    "dilute-steps": 1,
    "pool": 80,
    "eval-size": 2,
    "every": 2,
    "workers": 1,
    "placeholder-share": 1,
}
SMALL = [f"--{name}={value}" for name, value in ARGUMENTS.items()]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrain")
    main(["--output", str(folder), *SMALL])
    return folder


def test_a_short_run_leaves_a_pipeline(output):
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(output / "sd3", text_encoder_3=None, tokenizer_3=None)
    pictures = sample_rows(pipeline, tiny_prompts("test", "ocr", 2))
    assert pictures.shape == (2, 3, 32, 32)
    assert pictures.isfinite().all()


def test_a_run_that_was_interrupted_ends_with_the_same_weights(output, tmp_path):
    from gradbalance_diffusers.tiny import train_flow

    updates = []
    original = train_flow.FlowTrainer._update

    def interrupted(self, stage):
        if len(updates) == 2:
            updates.append("interrupted")
            raise KeyboardInterrupt
        updates.append("update")
        return original(self, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_flow.FlowTrainer, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(["--output", str(tmp_path), *SMALL])
        main(["--output", str(tmp_path), *SMALL])
    assert updates == ["update", "update", "interrupted", "update"]
    whole, resumed = (torch.load(folder / "work/dilute.pt", weights_only=True) for folder in (output, tmp_path))
    assert whole["step"] == resumed["step"] == 3
    for a, b in zip(whole["average"], resumed["average"], strict=True):
        assert torch.equal(a, b)


def test_two_workers_train_as_one_does(output, tmp_path):
    main(["--output", str(tmp_path), *SMALL, "--workers=2"])
    one, two = (torch.load(folder / "work/dilute.pt", weights_only=True)["average"] for folder in (output, tmp_path))
    difference = max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))
    assert difference < 1e-4
