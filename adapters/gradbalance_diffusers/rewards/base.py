"""What a reward is, and how several are run on the same samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import torch
from torch import Tensor

from gradbalance.errors import GradBalanceError, InvalidArgumentError

from .scores import check_scores, lost_scores
from .table import RewardTable
from .workers import SerialWorker, run_into

RESERVED = ("self", "images", "prompts")

OnError: TypeAlias = Literal["raise", "mask"]
"""What a call of a reward that fails does: stop, or leave its samples without a score and count them."""


@runtime_checkable
class Reward(Protocol):
    """A scorer of images; larger is better, in any unit.

    It is called with ``images [B, 3, H, W]`` (float in [0, 1], not to be changed in place), B ``prompts`` and, as
    keywords, one list of length B per metadata key, with None for a sample that lacks the key. It returns B numbers;
    None or NaN means that the reward does not apply to the sample, a :class:`LostScore` that it does and the score was
    lost. A reward in a :class:`RewardSet` is only ever called
    by one thread at a time.

    Attributes:
        name: The name of the objective.
    """

    name: str

    def __call__(self, images: Tensor, prompts: list[str], **metadata: list[Any]) -> Sequence[float | None] | Tensor:
        """Score a batch."""
        ...


class RewardError(GradBalanceError, RuntimeError):
    """A reward raised or ran out of time.

    Attributes:
        reward: Its name.
        batch: Number of the batch, counted from 0 in the order of submission.
    """

    def __init__(self, message: str, reward: str, batch: int) -> None:
        super().__init__(message)
        self.reward = reward
        self.batch = batch


class PendingRewards:
    """Scores on their way; made by :meth:`RewardSet.submit`."""

    def __init__(self, owner: RewardSet, batch: int, prompts: list[str], futures: Mapping[str, Future[Any]]) -> None:
        self._owner, self._batch, self._prompts, self._futures = owner, batch, prompts, futures
        self._table: RewardTable | None = None

    def result(self) -> RewardTable:
        """Wait for all rewards of this batch and return their scores; asked again, the same table.

        Raises:
            RewardError: A reward raised or timed out, and ``on_error`` says ``"raise"`` for it.
            InvalidArgumentError: A reward returned something else than B numbers.
        """
        if self._table is None:
            found = {name: self._column(name, future) for name, future in self._futures.items()}
            values, lost = (torch.stack(columns, dim=1) for columns in zip(*found.values(), strict=True))
            self._table = RewardTable(tuple(found), values, ~values.isnan(), lost)
        return self._table

    def check(self) -> bool:
        """Whether all rewards have ended, without waiting.

        Raises:
            RewardError: One has failed, and ``on_error`` says ``"raise"`` for it.
        """
        for name, future in self._futures.items():
            if self._owner.on_error[name] == "raise" and future.done() and future.exception() is not None:
                self._column(name, future)
        return all(future.done() for future in self._futures.values())

    def _column(self, name: str, future: Future[Any]) -> tuple[Tensor, Tensor]:
        """Scores of one reward, and which of them were lost."""
        size = len(self._prompts)
        where = f"on batch {self._batch} of {size} samples"
        try:
            returned = future.result(timeout=self._owner.timeout)
        except Exception as error:
            if isinstance(error, FutureTimeoutError) and not future.done():
                what = f"gave no result within the timeout of {self._owner.timeout} s"
            else:
                what = f"raised {type(error).__name__}: {error}"
            message = f"Reward {name!r} {what}, {where}, the first with the prompt {self._prompts[0]!r}."
            if self._owner.on_error[name] == "raise":
                remedy = ' Repair it, or build the RewardSet with on_error="mask" to go on without these scores.'
                raise RewardError(message + remedy, name, self._batch) from error
            warnings.warn(f"{message} Its scores for this batch are masked.", RuntimeWarning, stacklevel=3)
            return torch.full((size,), float("nan"), dtype=torch.float64), torch.ones(size, dtype=torch.bool)
        column = check_scores(name, returned, size)
        reasons = lost_scores(returned)
        if reasons:
            first = min(reasons)
            warnings.warn(
                f"Reward {name!r} lost the scores of {len(reasons)} samples {where}, which are masked. The first is "
                f"sample {first} with the prompt {self._prompts[first]!r}: {reasons[first]}",
                RuntimeWarning,
                stacklevel=3,
            )
        return column, torch.tensor([i in reasons for i in range(size)])


class RewardSet:
    """Several rewards on the same images. It never averages: every reward stays a column of its own.

    >>> class Brightness:
    ...     name = "brightness"
    ...     def __call__(self, images, prompts, **metadata):
    ...         return images.mean(dim=(1, 2, 3))
    >>> table = RewardSet([Brightness()])(torch.full((2, 3, 4, 4), 0.5), ["a", "b"], [{}, {}])
    >>> table.names, table.values.tolist()
    (('brightness',), [[0.5], [0.5]])

    Args:
        rewards: Rewards with distinct names, or a mapping from names to callables of the same form.
        on_error: ``"raise"``: a reward that raises or times out stops with its name and batch. ``"mask"``: its scores
            of the batch are missing, a RuntimeWarning says so and the table's ``errors`` counts the samples. One word
            for all rewards, or a mapping from names to words, ``"raise"`` for those left out. Scores of a wrong form
            (length, type, Inf) are a mistake in the reward and always raise; a :class:`LostScore` never does.
        workers: Threads. 0 runs the rewards inside :meth:`submit`; with n threads, reward k always runs in thread
            k mod n, beside the caller and one call at a time.
        timeout: Longest wait in seconds for one reward on one batch, counted from when its result is asked for; needs
            ``workers``. The thread of a reward that hangs cannot be stopped: rewards that share it time out too.

    Raises:
        InvalidArgumentError: No rewards, names missing or repeated, or options that do not fit.
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]] | Sequence[Reward],
        *,
        on_error: OnError | Mapping[str, OnError] = "raise",
        workers: int = 0,
        timeout: float | None = None,
    ) -> None:
        self._rewards = _by_name(rewards)
        if workers < 0 or (timeout is not None and (workers == 0 or timeout <= 0)):
            raise InvalidArgumentError(
                "`workers` must not be negative, and `timeout` must be positive and needs workers >= 1, because a call "
                f"in the caller's own thread cannot be left. Found workers={workers}, timeout={timeout}."
            )
        self.on_error = _policies(on_error, self.names)
        self.timeout = timeout
        self._workers = [SerialWorker() for _ in range(min(workers, len(self._rewards)))]
        self._batches = 0
        self._running: list[PendingRewards] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, the order of the columns."""
        return tuple(self._rewards)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> RewardTable:
        """Score a batch and wait: ``submit(...).result()``."""
        return self.submit(images, prompts, metadata).result()

    def submit(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> PendingRewards:
        """Start scoring a batch.

        Args:
            images: ``[B, 3, H, W]`` float in [0, 1]. With workers, do not change it before the result is there.
            prompts: B texts.
            metadata: B mappings with string keys, or None. A key that only some samples have is None for the others.

        Raises:
            InvalidArgumentError: Shapes or lengths that do not fit, or a reserved metadata key.
            RewardError: A reward has failed on an earlier batch. The caller learns of it here, and not only when it
                asks for that batch, perhaps after sampling many more.
        """
        running, self._running = self._running, []
        self._running = [pending for pending in running if not pending.check()]
        texts = list(prompts)
        _check_batch(images, texts, metadata)
        keywords = _columns([{}] * len(texts) if metadata is None else list(metadata))
        futures: dict[str, Future[Any]] = {}
        for k, (name, reward) in enumerate(self._rewards.items()):
            job = partial(_score, reward, images, texts, keywords)
            if self._workers:
                futures[name] = self._workers[k % len(self._workers)].submit(job)
            else:
                futures[name] = Future()
                run_into(futures[name], job)
        pending = PendingRewards(self, self._batches, texts, futures)
        self._batches += 1
        self._running.append(pending)
        return pending


def _score(reward: Callable[..., Any], images: Tensor, prompts: list[str], keywords: dict[str, list[Any]]) -> Any:
    with torch.no_grad():  # gradient mode belongs to a thread, so it is set where the reward runs
        return reward(images, list(prompts), **{key: list(column) for key, column in keywords.items()})


def _by_name(rewards: Mapping[str, Callable[..., Any]] | Sequence[Reward]) -> dict[str, Callable[..., Any]]:
    if isinstance(rewards, Mapping):
        named = list(rewards.items())
    else:
        nameless = [reward for reward in rewards if not isinstance(getattr(reward, "name", None), str)]
        if nameless:
            raise InvalidArgumentError(
                f"Each of `rewards` must have an attribute `name`. Found none on {nameless[0]!r}. "
                "Add it, or pass a mapping from names to rewards."
            )
        named = [(reward.name, reward) for reward in rewards]
    names = [name for name, _ in named]
    if not names or len(set(names)) < len(names) or not all(callable(reward) for _, reward in named):
        raise InvalidArgumentError(f"`rewards` must be callables with distinct names, at least one. Found {names}.")
    return dict(named)


def _policies(on_error: OnError | Mapping[str, OnError], names: Sequence[str]) -> dict[str, OnError]:
    """What to do by reward name."""
    if not isinstance(on_error, Mapping):
        on_error = dict.fromkeys(names, on_error)
    wrong = {name: word for name, word in on_error.items() if name not in names or word not in get_args(OnError)}
    if wrong:
        raise InvalidArgumentError(
            f"`on_error` must be 'raise' or 'mask', for all rewards or by name, with names of {list(names)}. "
            f"Found {wrong}."
        )
    return {name: on_error.get(name, "raise") for name in names}


def _check_batch(images: Tensor, prompts: list[str], metadata: Sequence[Mapping[str, Any]] | None) -> None:
    if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point() or not len(images):
        raise InvalidArgumentError(
            f"`images` must be [B, 3, H, W] floats in [0, 1], B >= 1. Found {tuple(images.shape)} {images.dtype}."
        )
    if len(prompts) != len(images) or (metadata is not None and len(metadata) != len(images)):
        raise InvalidArgumentError(
            f"`prompts` and `metadata` must have one entry per image. Found {len(images)} images, {len(prompts)} "
            f"prompts, {'no' if metadata is None else len(metadata)} metadata."
        )


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of key-value pairs to one list per key, over the union of the keys, None where a row lacks it."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    refused = [key for key in keys if not isinstance(key, str) or key in RESERVED]
    if refused:
        raise InvalidArgumentError(f"Keys of `metadata` must be strings other than {list(RESERVED)}. Found {refused}.")
    return {key: [row.get(key) for row in rows] for key in keys}
