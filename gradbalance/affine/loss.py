"""Losses that are affine in per-sample terms, so that any weighting of K objectives costs one backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbalance.affine.coefficients import interpolation_coefficients, linear_coefficients
from gradbalance.errors import InvalidArgumentError, NonFiniteError


class AffineLoss:
    """K objectives that are weighted sums of the same M x B per-sample terms.

    With terms T and constant coefficients C,

        objective_k = sum_m sum_i C[k, m, i] * T[m, i],

    so for weights w the weighted sum of objectives is ``sum_m sum_i (sum_k w_k C[k, m, i]) * T[m, i]``: one backward
    pass, exact for every w, mask and clamp. All normalization (means, counts, masks) is in C; nothing is divided
    afterwards. Rewards enter losses this way in DiffusionNFT (M = 2, affine in the optimality probability r) and in
    policy gradients (M = 1, linear in the advantage).

    Args:
        terms: [M, B] differentiable terms, any floating dtype. Products and sums are taken in at least float32.
        coefficients: [K, M, B] constants (detached here), finite. They are checked where they live and then moved to
            the device of ``terms``: coefficients on the CPU cost no device synchronization.
        names: K distinct names; ``objective_0`` ... if left out.
        active: bool [K], which objectives have any defined sample in this micro-batch. Left out: those with a
            coefficient other than zero.
        common: Scalar part that all objectives share and that is to be added outside the balancing
            (``extra_loss=loss.common``). Set by :meth:`interpolate` with ``center=True``.

    Attributes:
        terms: As given.
        coefficients: [K, M, B], detached, in the dtype of ``terms`` promoted to at least float32, on its device.
        names: tuple of K names.
        active: bool [K], on the device where the coefficients were given.
        common: Scalar tensor or None.

    Raises:
        InvalidArgumentError: Shapes, dtypes or names that do not fit.
        NonFiniteError: A coefficient is NaN or Inf; names its objectives.

    >>> terms = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    >>> loss = AffineLoss(terms, torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.5, 0.5]]]), names=("first", "rest"))
    >>> loss.objectives().tolist()
    [1.0, 2.5]
    >>> loss.scalarize([2.0, 4.0]).item()
    12.0
    """

    def __init__(
        self,
        terms: Tensor,
        coefficients: Tensor,
        names: Sequence[str] | None = None,
        *,
        active: Tensor | None = None,
        common: Tensor | None = None,
    ) -> None:
        if terms.dim() != 2 or not terms.is_floating_point():
            raise InvalidArgumentError(
                f"terms must be a floating tensor of shape [M, B], found {_describe(terms)}; stack per-sample terms "
                "with torch.stack([first, second]) or add a dimension with terms[None]."
            )
        coefficients = coefficients.detach()
        if coefficients.dim() != 3 or coefficients.shape[1:] != terms.shape or coefficients.shape[0] == 0:
            raise InvalidArgumentError(
                f"coefficients must have shape [K, M, B] = [K, {terms.shape[0]}, {terms.shape[1]}] with K >= 1 to fit "
                f"terms, found {_describe(coefficients)}."
            )
        self.names = _checked_names(names, coefficients.shape[0])
        finite = torch.isfinite(coefficients).flatten(1).all(1).tolist()
        if not all(finite):
            bad = [name for name, good in zip(self.names, finite, strict=True) if not good]
            raise NonFiniteError(f"coefficients hold NaN or Inf for objectives {bad}; mask those samples instead.", bad)
        if active is not None and (active.dtype != torch.bool or active.shape != coefficients.shape[:1]):
            raise InvalidArgumentError(
                f"active must be a bool tensor of shape [{coefficients.shape[0]}], found {_describe(active)}."
            )
        self.terms = terms
        self.active = (coefficients != 0).flatten(1).any(1) if active is None else active
        self.coefficients = coefficients.to(terms.device, torch.promote_types(terms.dtype, torch.float32))
        self.common = common

    def __len__(self) -> int:
        return len(self.names)

    def objective(self, index: int) -> Tensor:
        """Objective ``index`` alone, a differentiable scalar: ``sum_m sum_i C[index, m, i] * T[m, i]``."""
        return (self.coefficients[index] * self.terms).sum()

    def objectives(self) -> Tensor:
        """All objectives: differentiable [K] in the dtype of ``coefficients``."""
        # Products and a sum, not einsum: autocast would run a matrix product in half precision.
        return (self.coefficients * self.terms).sum((1, 2))

    def scalarize(self, weights: Tensor | Sequence[float]) -> Tensor:
        """The weighted sum of objectives as one scalar with the gradient ``sum_k weights_k * grad objective_k``.

        Args:
            weights: K constants (detached), any sign and sum.

        >>> terms = torch.tensor([0.5, 0.25], requires_grad=True)
        >>> loss = AffineLoss.linear(terms, torch.tensor([[1.0, -1.0], [2.0, 0.0]]))
        >>> loss.scalarize([1.0, 1.0]).backward()
        >>> terms.grad
        tensor([0., 1.])
        """
        weights = torch.as_tensor(weights).detach().to(self.coefficients)
        if weights.shape != self.active.shape:
            raise InvalidArgumentError(f"weights must hold {len(self)} numbers, found {_describe(weights)}.")
        mixed = (weights[:, None, None] * self.coefficients).sum(0)
        return (mixed * self.terms).sum()

    def reordered(self, order: Sequence[int]) -> AffineLoss:
        """The same loss with objective ``order[j]`` at place j."""
        index = list(order)
        return AffineLoss(
            self.terms,
            self.coefficients[index],
            [self.names[k] for k in index],
            active=self.active[index],
            common=self.common,
        )

    @classmethod
    def interpolate(
        cls,
        positive: Tensor,
        negative: Tensor,
        r: Tensor,
        mask: Tensor | None = None,
        counts: Tensor | Sequence[float] | None = None,
        center: bool = False,
        batch_size: int | None = None,
        names: Sequence[str] | None = None,
        world_size: int = 1,
    ) -> AffineLoss:
        """The DiffusionNFT form: objective_k averages ``r * positive + (1 - r) * negative`` over its defined samples.

        With mask m and count n_k the coefficients are ``C[k, 0, i] = m_ik r_ik / n_k`` and
        ``C[k, 1, i] = m_ik (1 - r_ik) / n_k``. An objective with n_k = 0 gets zero coefficients, not NaN, and is not
        active.

        ``center=True`` splits ``r L+ + (1-r) L- = (L+ + L-)/2 + (r - 1/2)(L+ - L-)``: the objectives keep only the
        second part (M = 1, one term ``positive - negative``, coefficient ``m_ik (r_ik - 1/2) / n_k``), and the first,
        which knows no reward, is ``common = sum_i (L+_i + L-_i) / (2 batch_size)``, to be added once through
        ``extra_loss``.

        Args:
            positive: [B] terms L+, differentiable.
            negative: [B] terms L-, differentiable.
            r: [B, K] numbers in [0, 1], floating, integer or bool. May be anything, NaN included, where ``mask`` is
                False.
            mask: bool [B, K]; True where objective k is defined for sample i. None: everywhere.
            counts: K numbers n_k: defined samples of the whole cycle, over micro-batches and ranks. None: this batch's
                own.
            center: Keep the shared part out of the objectives.
            batch_size: Samples in the whole cycle, over micro-batches and ranks, for ``common``. None: B of each rank.
            names: K names.
            world_size: Over how many ranks losses are averaged: with ``counts`` and ``batch_size`` of all ranks, sums
                over this rank's samples are multiplied by it, so that the mean over ranks is the mean over samples.

        Values are checked where ``r`` lives, in one reduction: with ``r`` and ``mask`` on the CPU no device is
        synchronized.

        Raises:
            InvalidArgumentError: Wrong shapes or dtypes, r outside [0, 1], counts below this batch's own.
            NonFiniteError: r is NaN or Inf where the mask is True; names the objectives.

        Source: DiffusionNFT (arXiv 2509.16117), eq. for the policy loss; MARBLE (arXiv 2605.06507), Proposition 1,
        which this makes exact under masks and clamps by mixing r and not the advantages.

        >>> plus, minus = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 5.0])
        >>> r = torch.tensor([[1.0, 0.5], [0.0, float("nan")]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> AffineLoss.interpolate(plus, minus, r, mask).objectives().tolist()
        [3.0, 1.5]
        """
        if positive.dim() != 1 or positive.shape != negative.shape:
            raise InvalidArgumentError(
                "positive and negative must both have shape [B], one number per sample, found "
                f"{_describe(positive)} and {_describe(negative)}; reduce each over all dimensions but the first."
            )
        if batch_size is not None and batch_size < len(positive):
            raise InvalidArgumentError(
                "batch_size is the number of samples in the whole cycle and cannot be below this batch's "
                f"{len(positive)}, found {batch_size}."
            )
        dtype = torch.promote_types(positive.dtype, torch.float32)
        _check_world_size(world_size, counts)
        coefficients, active = interpolation_coefficients(r, mask, counts, len(positive), dtype, names)
        coefficients = coefficients * world_size
        if not center:
            return cls(torch.stack([positive, negative]), coefficients, names, active=active)
        difference = (positive - negative)[None]
        # m r/n - m (1-r)/n is twice m (r - 1/2)/n.
        centered = (coefficients[:, :1] - coefficients[:, 1:]) / 2
        ranks = 1 if batch_size is None else world_size
        common = (positive.to(dtype) + negative.to(dtype)).sum() * ranks / (2 * (batch_size or len(positive)))
        return cls(difference, centered, names, active=active, common=common)

    @classmethod
    def linear(
        cls,
        terms: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        counts: Tensor | Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        world_size: int = 1,
    ) -> AffineLoss:
        """Policy-gradient form: objective_k is the mean over its defined samples of ``advantages[i, k] * terms[i]``.

        M = 1 and ``C[k, 0, i] = m_ik A_ik / n_k``: the `linear` collector gets all K rows from one backward pass.

        Args:
            terms: [B] terms, differentiable, for example minus the log-probability of a sequence.
            advantages: [B, K] numbers. May be anything, NaN included, where ``mask`` is False.
            mask: bool [B, K]; None: True everywhere.
            counts: K numbers n_k of the whole cycle, over micro-batches and ranks; None: this batch's own.
            names: K names.
            world_size: Over how many ranks losses are averaged; see :meth:`interpolate`.

        Raises:
            InvalidArgumentError: Wrong shapes or dtypes, counts below this batch's own.
            NonFiniteError: An advantage is NaN or Inf where the mask is True; names the objectives.

        >>> AffineLoss.linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [3.0]])).objectives().tolist()
        [3.5]
        """
        if terms.dim() != 1:
            raise InvalidArgumentError(f"terms must have shape [B], one number per sample, found {_describe(terms)}.")
        dtype = torch.promote_types(terms.dtype, torch.float32)
        _check_world_size(world_size, counts)
        coefficients, active = linear_coefficients(advantages, mask, counts, len(terms), dtype, names)
        return cls(terms[None], coefficients * world_size, names, active=active)

    def __repr__(self) -> str:
        objectives, terms, batch = self.coefficients.shape
        return f"AffineLoss(K={objectives}, M={terms}, B={batch}, names={self.names})"


def _check_world_size(world_size: int, counts: Tensor | Sequence[float] | None) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgumentError(f"world_size must be a number of ranks, at least 1, found {world_size!r}.")
    if world_size > 1 and counts is None:
        raise InvalidArgumentError(
            f"counts must be those of all ranks with world_size = {world_size}, found None: pass "
            "counts=gradbalance.distributed.global_counts(mask)."
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def _checked_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"objective_{k}" for k in range(count))
    if isinstance(names, str) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"names must be {count} strings, one per objective, found {names!r}.")
    if len(set(names)) != count:
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise InvalidArgumentError(f"names must be distinct, found {twice} more than once.")
    return tuple(names)
