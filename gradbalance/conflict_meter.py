"""Do objectives conflict in truth, or only in the noise of a batch? Cosines between expected gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.special import stdtrit
from torch import Tensor

from gradbalance.errors import InvalidArgumentError, MissingDependencyError, NonFiniteError, StateError
from gradbalance.gradients.collect import collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.losses import Losses, as_objectives
from gradbalance.gradients.rows import Rows, balanced_parameters
from gradbalance.gramian import cosines, gramian

Verdict = Literal["conflict", "aligned", "not yet known"]
_KEYS = ("names", "batches", "groups", "sums", "products", "present", "in_batch")


@dataclass(frozen=True)
class Pair:
    """What is known of two objectives.

    Attributes:
        first: Name of one.
        second: Name of the other.
        cosine: Estimate for the expected gradients; NaN while noise hides the length of one of them.
        error: Its jackknife standard error; NaN where it cannot be told.
        in_batch: Mean cosine within the batches, which noise draws towards 0.
        verdict: ``"conflict"`` or ``"aligned"`` where |cosine| > q error, by the sign; else ``"not yet known"``. q is
            the 97.5 % quantile of Student's t with m - 1 degrees of freedom for m groups of batches: 2.1 for 16, 4.3
            for 3.
    """

    first: str
    second: str
    cosine: float
    error: float
    in_batch: float
    verdict: Verdict


class ConflictMeter:
    """Cosines between the *expected* gradients of K objectives, without the bias of batch noise.

    The rows of one batch are g = mu + noise. Noise that the objectives do not share lengthens the rows and draws their
    cosine towards 0; noise that they share (the same samples) draws it to the noise's own cosine. Products between
    *different* batches have neither fault: with the sums ``S = sum_b g^b`` and ``D = sum_b g^b (g^b)'`` over n batches,

        U = (S S' - D) / (n (n - 1)),        E[U] = mu mu',        cosine_ij = U_ij / sqrt(U_ii U_jj).

    U is unbiased; the cosine is so up to terms of order 1/n. It is not confined to [-1, 1] while noise is large, and
    not defined where U_ii <= 0.

    Standard errors are those of the jackknife over m groups of batches, dealt out in turn: leave a group out, estimate
    again, and see how the estimate moves. (For groups of unequal size: Busing, Meijer and van der Leeden 1999,
    Statistics and Computing 9.) They are themselves rough, by about 1 / sqrt(2 m); below 3 batches there are none.

    A row that is exactly zero is an objective without signal in that batch: it is left out, and the pairs of batches in
    which both objectives were present are counted for each pair of objectives.

    **When it is valid.** Batches must be independent, and the parameters must not move much while the meter collects:
    then E[g] is one thing. During training, use a new meter every few hundred steps (or a small learning rate); what
    drifts is averaged. Cosines are those of plain gradients: an optimizer such as Adam steps in another metric.

    Memory: m K P numbers (float32, or float64 if the rows are) and no more however many batches; ``groups=8`` halves
    that of the default at the price of rougher errors. A batch costs one pass over its rows, reading the estimates the
    products of m K rows of length P.

    Training collects rows anyway: ``BalancedOptimizer(..., on_rows=meter.update)`` feeds a meter from its refreshes.

    Args:
        groups: m, at least 3.
        device: Where the sums are kept, for example ``"cpu"`` to spare a GPU; None for where the first rows are.

    Attributes:
        names: K objectives, from the first batch; None before.
        batches: n, how many batches were taken.

    Raises:
        InvalidArgumentError: ``groups`` is not an integer of at least 3.

    >>> generator = torch.Generator().manual_seed(0)
    >>> means = torch.tensor([[1.0, 0.0], [-0.6, 0.8]])
    >>> meter = ConflictMeter()
    >>> for _ in range(400):
    ...     noise = 1.5 * torch.randn(2, 2, generator=generator)
    ...     meter.update(means + noise, ["a", "b"])
    >>> pair = meter.pairs()[0]
    >>> pair.verdict, abs(pair.cosine + 0.6) < 2 * pair.error, abs(pair.in_batch) < 0.3
    ('conflict', True, True)
    """

    def __init__(self, *, groups: int = 16, device: torch.device | str | None = None) -> None:
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 3:
            raise InvalidArgumentError(f"`groups` should be an integer >= 3. Found {groups!r}.")
        self._groups = groups
        self._device = None if device is None else torch.device(device)
        self.reset()

    def reset(self) -> None:
        """Forget all batches, for example because the parameters have moved."""
        self.names: tuple[str, ...] | None = None
        self.batches = 0
        # One [m, K, P_j] tensor per block.
        self._sums: list[Tensor] = []
        self._products = self._present = torch.zeros(self._groups, 0, 0, dtype=torch.float64)
        self._in_batch = torch.zeros(0, 0, dtype=torch.float64)
        self._known: Tensor | None = None

    def update(self, rows: Tensor | Iterable[Tensor], names: Sequence[str]) -> None:
        """Take the rows of one batch.

        Args:
            rows: Gradients [K, P] of one batch, or blocks [K, P_j] that make them up side by side, the same in every
                call. They are read, not kept.
            names: K objectives, the same in every call.

        Raises:
            InvalidArgumentError: Rows of a wrong form, or other objectives or sizes than before.
            NonFiniteError: A row is NaN or Inf. Nothing is counted.
        """
        blocks = [rows.detach()] if isinstance(rows, Tensor) else [block.detach() for block in rows]
        gram = gramian(blocks)
        self._check(blocks, gram, tuple(names))
        if self.names is None:
            self._start(blocks, tuple(names))
        group = self.batches % self._groups
        for total, block in zip(self._sums, blocks, strict=True):
            total[group].add_(block.to(total.device, total.dtype))
        alive = (gram.diagonal() > 0).double()
        self._products[group] += gram
        self._present[group] += torch.outer(alive, alive)
        self._in_batch += cosines(gram)
        self.batches += 1
        self._known = None

    def measure(self, losses: Losses, params: Iterable[Tensor]) -> None:
        """Take the gradients of one batch's losses, leaving ``.grad`` alone.

        Args:
            losses: As in :func:`gradbalance.backward`. Their graph is freed.
            params: The tensors to differentiate by, for example ``trunk.parameters()``.

        Raises:
            InvalidArgumentError: Losses or params of a wrong form, or others than before.
            NonFiniteError: A loss or a row is NaN or Inf. Nothing is counted.

        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> meter = ConflictMeter()
        >>> meter.measure({"a": weight.sum(), "b": -weight[0]}, [weight])
        >>> meter.batches, weight.grad
        (1, None)
        """
        with torch.enable_grad():
            objectives = as_objectives(losses)
            objectives.require_finite()
            collected = Rows(balanced_parameters(params), len(objectives))
            graph = explore(objectives.roots, None)
            collect(objectives, collected, graph, collector="auto", check=graph.unchecked)
        self.update(collected.blocks, objectives.names)

    def cosines(self) -> Tensor:
        """Cosines of the expected gradients, float64 [K, K]; NaN where undefined.

        Raises:
            StateError: Fewer than 2 batches.
        """
        if self.batches < 2:
            raise StateError(f"cosines of expected gradients need at least 2 batches, found {self.batches}.")
        return self._estimates()[0].clone()

    def errors(self) -> Tensor:
        """Jackknife standard errors of :meth:`cosines`, float64 [K, K]; 0 on the diagonal, NaN where undefined.

        Raises:
            StateError: Fewer than 2 batches.
        """
        full = self.cosines()
        sizes = self._sizes()
        used = len(sizes)
        if used < 3:
            return torch.full_like(full, torch.nan).fill_diagonal_(0)
        left_out = self._estimates()[1:]
        share = (sizes / self.batches)[:, None, None]
        pseudo = (full - (1 - share) * left_out) / share
        center = used * full - ((1 - share) * left_out).sum(0)
        variance = ((pseudo - center) ** 2 * share / (1 - share)).mean(0)
        return variance.sqrt().fill_diagonal_(0)

    @property
    def _quantile(self) -> float:
        """How many standard errors tell a cosine from 0: more where few groups know them badly."""
        return float(stdtrit(max(min(self._groups, self.batches) - 1, 1), 0.975))

    def in_batch(self) -> Tensor:
        """Mean cosine within the batches, float64 [K, K], over those where both rows are not zero: noisy and biased.

        NaN for a pair that was never there together.
        """
        return self._in_batch / self._present.sum(0)

    def pairs(self) -> list[Pair]:
        """All pairs of objectives, the most negative cosine first, undefined ones last.

        Raises:
            StateError: Fewer than 2 batches.
        """
        cosine, error, naive = self.cosines().tolist(), self.errors().tolist(), self.in_batch().tolist()
        names, quantile = self.names or (), self._quantile
        found = [
            Pair(
                names[i], names[j], cosine[i][j], error[i][j], naive[i][j], _judge(cosine[i][j], quantile * error[i][j])
            )
            for i in range(len(names))
            for j in range(i + 1, len(names))
        ]
        return sorted(found, key=lambda pair: pair.cosine if pair.cosine == pair.cosine else torch.inf)

    def table(self) -> str:
        """The pairs as text; a sentence while there are fewer than 2 batches."""
        if self.batches < 2:
            return f"ConflictMeter: {self.batches} batches so far, at least 2 are needed"
        pairs = self.pairs()
        width = max([len(name) for name in self.names or ()], default=0)
        head = f"cosines of expected gradients, {self.batches} batches (± standard error; in one batch)"
        lines = [
            f"{pair.first:<{width}}  {pair.second:<{width}}  {pair.cosine:+.2f} ± {pair.error:.2f}  "
            f"({pair.in_batch:+.2f})  {pair.verdict}"
            for pair in pairs
        ]
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | Path) -> None:
        """Draw the cosines as a heat map; those not yet known are in brackets.

        Args:
            path: Where to; the ending tells the format.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            StateError: Fewer than 2 batches.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependencyError("ConflictMeter.plot needs matplotlib. Run: pip install matplotlib") from error
        cosine, limit, names = self.cosines(), self._quantile * self.errors(), self.names or ()
        figure = Figure(figsize=(1.5 + 0.8 * len(names), 1 + 0.8 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(cosine.numpy(), vmin=-1, vmax=1, cmap="RdBu")
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        for i in range(len(names)):
            for j in range(len(names)):
                c = cosine[i, j].item()
                known = i == j or _judge(c, limit[i, j].item()) != "not yet known"
                color = "white" if abs(c) > 0.6 else "black"
                axes.text(
                    j, i, f"{c:.2f}" if known else f"({c:.2f})", ha="center", va="center", color=color, fontsize=8
                )
        figure.colorbar(image, label="cosine of expected gradients")
        axes.set_title(f"{self.batches} batches", fontsize=10)
        figure.savefig(path, dpi=150)

    def state_dict(self) -> dict[str, Any]:
        """All that was collected: names, counts, and copies of the sums as tensors (m K P numbers)."""
        return {
            "names": None if self.names is None else list(self.names),
            "batches": self.batches,
            "groups": self._groups,
            "sums": [block.clone() for block in self._sums],
            "products": self._products.clone(),
            "present": self._present.clone(),
            "in_batch": self._in_batch.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            StateError: Keys are missing or unknown, or another number of groups. The own state stays as it was.
        """
        if set(state) != set(_KEYS):
            raise StateError(f"state of ConflictMeter must have keys {list(_KEYS)}, found {sorted(state)}.")
        if state["groups"] != self._groups:
            raise StateError(
                f"state of ConflictMeter must have groups = {self._groups}, found {state['groups']}; make the meter "
                f"with groups={state['groups']}."
            )
        self.names = None if state["names"] is None else tuple(state["names"])
        self.batches = state["batches"]
        self._sums = [block.clone() for block in state["sums"]]
        self._products, self._present = state["products"].clone(), state["present"].clone()
        self._in_batch = state["in_batch"].clone()
        self._known = None

    def _check(self, blocks: list[Tensor], gram: Tensor, names: tuple[str, ...]) -> None:
        if len(names) != len(gram) or len(set(names)) != len(names):
            raise InvalidArgumentError(f"`names` should be {len(gram)} distinct names, one per row. Found {names}.")
        if self.names is not None and names != self.names:
            raise InvalidArgumentError(f"`names` should be {self.names}, as before. Found {names}. Use another meter.")
        if self._sums:
            found, known = [list(b.shape) for b in blocks], [list(b.shape[1:]) for b in self._sums]
            if found != known:
                raise InvalidArgumentError(f"`rows` should have shapes {known}, as before. Found {found}.")
        finite = torch.isfinite(gram.diagonal()).tolist()
        if not all(finite):
            bad = [name for name, good in zip(names, finite, strict=True) if not good]
            raise NonFiniteError(f"rows of objectives {bad} hold NaN or Inf. The batch was not counted.", bad)

    def _start(self, blocks: list[Tensor], names: tuple[str, ...]) -> None:
        self.names = names
        count = len(names)
        self._sums = [
            torch.zeros(
                (self._groups, *block.shape),
                device=self._device or block.device,
                dtype=torch.float64 if block.dtype == torch.float64 else torch.float32,
            )
            for block in blocks
        ]
        self._products = torch.zeros(self._groups, count, count, dtype=torch.float64)
        self._present = torch.zeros_like(self._products)
        self._in_batch = torch.zeros(count, count, dtype=torch.float64)

    def _sizes(self) -> Tensor:
        """Batches in each group that has any."""
        used = min(self._groups, self.batches)
        return torch.tensor([(self.batches - 1 - group) // self._groups + 1 for group in range(used)]).double()

    def _estimates(self) -> Tensor:
        """Cosines from all batches, and with each group left out: float64 [1 + used groups, K, K]."""
        # Made of m K x m K products of rows, and asked for by all that is read off a meter.
        if self._known is None:
            self._known = self._estimated()
        return self._known

    def _estimated(self) -> Tensor:
        used = min(self._groups, self.batches)
        count = len(self.names or ())
        stacked = gramian([block[:used].flatten(0, 1) for block in self._sums])
        between = stacked.reshape(used, count, used, count).permute(0, 2, 1, 3)
        everything = between.sum((0, 1))
        own = torch.stack([between[group, group] for group in range(used)])
        squares = torch.cat([everything[None], everything - between.sum(0) - between.sum(1) + own])
        products = _leave_out(self._products[:used])
        present = _leave_out(self._present[:used])
        seen = present.diagonal(dim1=1, dim2=2)
        # Ordered pairs of different batches, the first with objective i and the second with objective j.
        pairs = seen[:, :, None] * seen[:, None, :] - present
        mean = torch.where(pairs > 0, (squares - products) / pairs, torch.nan)
        squared_length = mean.diagonal(dim1=1, dim2=2)
        length = torch.where(squared_length > 0, squared_length, torch.nan).sqrt()
        return mean / (length[:, :, None] * length[:, None, :])


def _leave_out(parts: Tensor) -> Tensor:
    """The sum of all parts, and the sums without each."""
    everything = parts.sum(0)
    return torch.cat([everything[None], everything - parts])


def _judge(cosine: float, limit: float) -> Verdict:
    if not abs(cosine) > limit:
        return "not yet known"
    return "conflict" if cosine < 0 else "aligned"
