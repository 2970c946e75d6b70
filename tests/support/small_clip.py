"""Very small random CLIP models with a tokenizer of single letters."""

from __future__ import annotations

from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from open_clip_reference import OpenCLIP, randomize

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def make_letter_tokenizer(*, end_last: bool = True) -> CLIPTokenizer:
    """One token per letter; the end token has the highest id, as in CLIP, or else a low one."""
    letters = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    marks = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*letters, *marks] if end_last else [*marks, *letters]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def make_small_clip(tokenizer: CLIPTokenizer, **text: object) -> CLIPModel:
    """2 layers, 16x16 pictures in patches of 4, 24 features, random weights."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config=tower | ids | {"vocab_size": len(tokenizer), "projection_dim": 24} | text,
        vision_config=tower | {"image_size": 16, "patch_size": 4, "projection_dim": 24},
        projection_dim=24,
    )
    model = CLIPModel(config)
    randomize(model)
    return model.eval()


def make_open_clip() -> OpenCLIP:
    """A small random CLIP in the layout of open_clip, for that tokenizer; 16 heads as ViT-H/14."""
    model = OpenCLIP(
        vision=(3, 64, 16, 40),
        text=(2, 32, 16, 48),
        grid=3,
        patch=4,
        vocabulary=len(make_letter_tokenizer()),
        length=77,
        dimension=24,
    )
    randomize(model)
    return model.eval()
