"""A CLIP tokenizer whose BPE knows the words of the tiny task."""

import string
from collections import Counter
from itertools import pairwise

from transformers import CLIPTokenizer

from gradbalance_diffusers.tiny.prompts import SOURCES, all_prompts

MAX_LENGTH = 18
"""Tokens a prompt is padded to; the longest prompt of the task has 16."""

_SPECIAL = ["<|startoftext|>", "<|endoftext|>"]
_END = "</w>"


def build_tokenizer() -> CLIPTokenizer:
    """Builds a tokenizer for which every word, digit and quotation mark of the tiny task is one token.

    Other words are spelled in pieces; the model has not seen them.

    Example:
        >>> tokenizer = build_tokenizer()
        >>> tokenizer.tokenize('a red sign that says "42"')
        ['a</w>', 'red</w>', 'sign</w>', 'that</w>', 'says</w>', '"</w>', '4</w>', '2</w>', '"</w>']
    """
    prompts = [row["prompt"] for source in SOURCES for row in all_prompts(source)]
    words = sorted({word for prompt in prompts for word in prompt.replace('"', ' " ').split() if word.isalpha()})
    merges = learn_merges(words)
    characters = sorted(set(string.printable) - set(string.whitespace) - set(string.ascii_uppercase))
    pieces = [*_SPECIAL, *characters, *(c + _END for c in characters), *(a + b for a, b in merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_LENGTH)


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Learns byte-pair merges until every word is one piece (Sennrich et al. 2016, algorithm 1).

    The most frequent pair is merged first; of equally frequent ones, the first in alphabetical order.

    Example:
        >>> learn_merges(["red"])
        [('e', 'd</w>'), ('r', 'ed</w>')]
    """
    split = [[*word[:-1], word[-1] + _END] for word in words]
    merges = []
    while pairs := Counter(pair for pieces in split for pair in pairwise(pieces)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = [_merge(pieces, best) for pieces in split]
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
