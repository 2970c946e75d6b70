from gradbalance_diffusers.tiny.prompts import SOURCES, all_prompts
from gradbalance_diffusers.tiny.tokenizer import MAX_LENGTH, build_tokenizer


def test_every_word_and_digit_is_one_token_and_every_prompt_fits():
    tokenizer = build_tokenizer()
    for source in SOURCES:
        prompts = [row["prompt"] for row in all_prompts(source)]
        lengths = [len(ids) for ids in tokenizer(prompts).input_ids]
        assert max(lengths) <= MAX_LENGTH
        for prompt in prompts[::50]:
            pieces = tokenizer.tokenize(prompt)
            assert all(piece.endswith("</w>") for piece in pieces)
            assert "".join(piece.removesuffix("</w>") for piece in pieces) == prompt.replace(" ", "")


def test_other_words_can_be_encoded():
    ids = build_tokenizer()("Zebras, at 50%!", padding="max_length", truncation=True).input_ids
    assert len(ids) == MAX_LENGTH
