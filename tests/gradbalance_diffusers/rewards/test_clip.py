import threading

import pytest
import torch
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPTokenizer

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.rewards.clip import CLIP
from gradbalance_diffusers.rewards.models import load_clip

PIXELS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TEXTS = ["a red cat", "", "two dogs", "a red cat", "x y z"]


@pytest.fixture(scope="module")
def clip(clip_path):
    return load_clip(clip_path, device="cpu")


@pytest.fixture(scope="module")
def bare(clip_path):
    return CLIPModel.from_pretrained(clip_path), CLIPTokenizer.from_pretrained(clip_path)


def test_attributes(clip, bare):
    assert clip.image_size == 16
    assert clip.dimension == 24
    assert clip.device == torch.device("cpu")
    assert clip.logit_scale == pytest.approx(bare[0].logit_scale.exp().item())


def test_image_features_are_those_of_the_model_with_norm_1(clip, bare):
    expected = normalize(bare[0].get_image_features(pixel_values=PIXELS).pooler_output, dim=-1)
    torch.testing.assert_close(clip.image_features(PIXELS), expected, atol=1e-6, rtol=0)


def test_text_features_are_those_of_the_model_in_the_order_of_the_texts(clip, bare):
    model, tokenizer = bare
    tokens = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    expected = normalize(model.get_text_features(**tokens).pooler_output, dim=-1)  # with the attention mask
    features = clip.text_features(TEXTS)
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=0)
    assert features[0].equal(features[3])


def test_the_text_is_pooled_at_its_end_token(clip, bare):
    model, tokenizer = bare
    ids = tokenizer("a red cat", return_tensors="pt").input_ids  # no padding: the end token is the last
    assert ids[0, -1] == tokenizer.eos_token_id
    hidden = model.text_model(input_ids=ids).last_hidden_state[:, -1]
    expected = normalize(model.text_projection(hidden), dim=-1)
    torch.testing.assert_close(clip.text_features(["a red cat"]), expected, atol=1e-6, rtol=0)


def test_cosines_pair_each_image_with_its_own_text(clip):
    cosines = clip.cosines(PIXELS, TEXTS[:4])
    expected = (clip.image_features(PIXELS) @ clip.text_features(TEXTS[:4]).T).diagonal()
    torch.testing.assert_close(cosines, expected)
    assert cosines.unique().numel() == 4


def test_a_long_text_is_cut_to_77_tokens(clip):
    words = ["a", "b"] * 150
    assert clip.text_features([" ".join(words)]).equal(clip.text_features([" ".join(words[:75])]))
    assert not clip.text_features([" ".join(words)]).allclose(clip.text_features([" ".join(words[:74])]))


def test_features_before_transformers_5_were_plain_tensors(clip, monkeypatch):
    expected = clip.image_features(PIXELS), clip.text_features(TEXTS)
    for name in ("get_image_features", "get_text_features"):
        new = getattr(clip._model, name)
        monkeypatch.setattr(clip._model, name, lambda new=new, **inputs: new(**inputs).pooler_output)
    assert clip.image_features(PIXELS).equal(expected[0])
    assert clip.text_features(TEXTS).equal(expected[1])


def test_autocast_around_the_call_changes_nothing(clip):
    expected = clip.cosines(PIXELS, TEXTS[:4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert clip.cosines(PIXELS, TEXTS[:4]).equal(expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_close_and_comes_back_in_float32(clip, clip_path, dtype):
    low = load_clip(clip_path, dtype=dtype, device="cpu")
    features = low.image_features(PIXELS)
    assert low._model.dtype == getattr(torch, dtype)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, clip.image_features(PIXELS), atol=0.03, rtol=0)
    assert not features.equal(clip.image_features(PIXELS))


def test_threads_do_not_disturb_each_other(clip):
    texts = [["a " * n] * 2 for n in range(1, 21)]
    expected = [clip.text_features(pair) for pair in texts]
    found = {}

    def encode(first):
        for i in range(first, 20, 4):
            found[i] = clip.text_features(texts[i])

    threads = [threading.Thread(target=encode, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[i].equal(expected[i]) for i in range(20))


def test_no_gradient_and_no_graph(clip):
    assert not clip.cosines(PIXELS.clone().requires_grad_(), TEXTS[:4]).requires_grad
    assert not any(parameter.requires_grad for parameter in clip._model.parameters())


class TestTokenizerFitsTheModel:
    def test_end_token_anywhere_if_the_configuration_says_where(self, small_clip, letter_tokenizer):
        tokenizer = letter_tokenizer(end_last=False)
        model = small_clip(tokenizer)
        ids = tokenizer("b c", return_tensors="pt").input_ids
        hidden = model.text_model(input_ids=ids).last_hidden_state[:, -1]
        expected = normalize(model.text_projection(hidden), dim=-1)
        torch.testing.assert_close(CLIP(model, tokenizer).text_features(["b c"]), expected, atol=1e-6, rtol=0)

    def test_old_configurations_pool_at_the_highest_id(self, small_clip, letter_tokenizer):
        """Configurations of OpenAI's models say eos_token_id 2, which is not the end token."""
        tokenizer = letter_tokenizer()
        new, old = small_clip(tokenizer), small_clip(tokenizer, eos_token_id=2)
        assert CLIP(old, tokenizer).text_features(TEXTS).equal(CLIP(new, tokenizer).text_features(TEXTS))

    def test_old_configuration_with_a_low_end_token(self, small_clip, letter_tokenizer):
        tokenizer = letter_tokenizer(end_last=False)
        with pytest.raises(InvalidArgumentError, match=r"the end token with id 73\. Found 74 tokens.* with id 1\."):
            CLIP(small_clip(tokenizer, eos_token_id=2), tokenizer)

    def test_another_end_token(self, small_clip, letter_tokenizer):
        model = small_clip(letter_tokenizer())
        with pytest.raises(InvalidArgumentError, match=r"`tokenizer` must be the one .* Found 74 tokens.* with id 1\."):
            CLIP(model, letter_tokenizer(end_last=False))

    def test_too_many_tokens(self, small_clip, letter_tokenizer):
        tokenizer = letter_tokenizer()
        model = small_clip(tokenizer, vocab_size=70)
        with pytest.raises(InvalidArgumentError, match=r"at most 70 tokens.*Found 74 tokens"):
            CLIP(model, tokenizer)
