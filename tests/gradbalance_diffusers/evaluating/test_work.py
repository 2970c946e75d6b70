from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbalance.errors import InvalidArgumentError
from gradbalance_diffusers.evaluating.work import Picture, batches, missing

SIZES = st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 7))


@given(SIZES)
def test_every_picture_is_in_one_batch(sizes: tuple[int, int, int]) -> None:
    prompts, samples, batch_size = sizes
    pictures = [picture for batch in batches(*sizes) for picture in batch]
    assert len(pictures) == len(set(pictures)) == prompts * samples
    assert max(len(batch) for batch in batches(*sizes)) <= batch_size


@given(SIZES)
def test_more_samples_add_batches_and_change_none(sizes: tuple[int, int, int]) -> None:
    prompts, samples, batch_size = sizes
    before = batches(*sizes)
    assert batches(prompts, samples + 1, batch_size)[: len(before)] == before


@given(SIZES, st.integers(0, 1000))
def test_seeds_differ_and_begin_as_in_training(sizes: tuple[int, int, int], first: int) -> None:
    prompts, _, _ = sizes
    pictures = [picture for batch in batches(*sizes) for picture in batch]
    seeds = [picture.seed(first, prompts) for picture in pictures]
    assert seeds == list(range(first, first + len(pictures)))


@given(SIZES, st.sets(st.integers(0, 60)))
def test_what_is_missing_comes_in_whole_batches(sizes: tuple[int, int, int], chosen: set[int]) -> None:
    work = batches(*sizes)
    pictures = [picture for batch in work for picture in batch]
    done = {pictures[i] for i in chosen if i < len(pictures)}
    remaining = missing(work, done)
    assert all(batch in work for batch in remaining)
    assert {p for batch in remaining for p in batch} >= set(pictures) - done
    assert all(not done.issuperset(batch) for batch in remaining)


def test_sizes_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        batches(3, 0, 1)


def test_file_names_sort_as_prompts_do() -> None:
    names = [Picture(prompt, 0).file_name for prompt in (3, 10, 200)]
    assert names == sorted(names)
