"""A CLIP tokenizer whose BPE knows the words of the tiny task."""

import json

from tokenizers import trainers
from transformers import CLIPTokenizer

from gradbalance_diffusers.tiny.prompts import SOURCES, all_prompts

MAX_LENGTH = 18
"""Tokens a prompt is padded to; the longest prompt of the task has 16."""

_SPECIAL = ["<|startoftext|>", "<|endoftext|>"]
_VOCABULARY_SIZE = 2_000  # an upper bound: training stops when every word is one token


def build_tokenizer() -> CLIPTokenizer:
    """Trains the BPE on the prompts of the tiny task; every word, digit and quotation mark becomes one token.

    All printable ASCII characters are in the alphabet, so any English prompt can be encoded, if not understood.

    Example:
        >>> tokenizer = build_tokenizer()
        >>> tokenizer.tokenize('a red sign that says "42"')
        ['a</w>', 'red</w>', 'sign</w>', 'that</w>', 'says</w>', '"</w>', '4</w>', '2</w>', '"</w>']
    """
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(_SPECIAL)}, merges=[])
    backend = tokenizer.backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        min_frequency=1,
        special_tokens=_SPECIAL,
        initial_alphabet=[chr(code) for code in range(33, 127) if not chr(code).isupper()],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    words = sorted({word for source in SOURCES for row in all_prompts(source) for word in _words(row["prompt"])})
    backend.train_from_iterator([" ".join(words)], trainer)
    vocabulary = backend.get_vocab()
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_LENGTH)


def _words(prompt: str) -> list[str]:
    return prompt.replace('"', ' " ').split()
