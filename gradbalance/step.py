"""The whole road: losses, per-objective gradients, Gramian, weights, one gradient. The file to read first."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradbalance.cycle import Cycle
from gradbalance.describe import describe
from gradbalance.distributed.agreement import agree
from gradbalance.distributed.ranks import Ranks, RanksLike, as_ranks, resolved
from gradbalance.gradients.collect import Collector, check_collector, collect
from gradbalance.gradients.graph import explore
from gradbalance.gradients.losses import Losses, Objectives, as_objectives, check_extra_loss
from gradbalance.gradients.plain import add_all, backward_scalarized, plain_gradients
from gradbalance.gradients.rows import Rows, balanced_parameters, require_finite_rows, without_faint_rows
from gradbalance.groups import Group
from gradbalance.info import BalanceInfo
from gradbalance.solve import BalancerLike, cached_weights, count_step, needs_rows, solve


@torch.enable_grad()
def backward(
    losses: Losses,
    params: Iterable[Tensor],
    balancer: BalancerLike,
    *,
    extra_loss: Tensor | None = None,
    collector: Collector = "auto",
    ranks: RanksLike = None,
) -> BalanceInfo:
    """Add one balanced gradient of several losses to ``.grad``: ``loss.backward()`` for more than one loss.

    With rows g_k = gradient of loss k with respect to ``params`` and weights c = balancer(Gramian of the rows),
    ``.grad`` of ``params`` grows by sum_k c_k g_k. Where a stateful balancer needs no rows (between the refreshes of
    MARBLE), it is one ordinary backward pass of sum_k c_k loss_k with the cached c.

    Leaves outside ``params`` that the losses reach (task heads) get the plain gradient of the sum of losses, never
    scaled by c. A parameter that some losses do not reach counts as zero in their rows; one that no loss reaches keeps
    ``.grad`` as it is. Afterwards the graph is freed, and a stateful balancer has counted one optimizer step.

    Args:
        losses: A dict name -> scalar tensor, a sequence of scalars, a tensor of shape [K], or a
            :class:`~gradbalance.AffineLoss`.
        params: The tensors to balance, for example ``trunk.parameters()``. Frozen ones are left out.
        balancer: Any callable from a Gramian (float64 [K, K], CPU) to K weights on the raw rows, for example
            ``gradbalance.MGDA()`` or a TorchJD weighting. Keep a stateful one between calls.
        extra_loss: A scalar added outside the balancing to everything it reaches: KL terms, weight penalties.
        collector: ``"passes"`` (one backward pass per objective), ``"linear"`` (an AffineLoss of a forward under
            :func:`gradbalance.record`), or ``"auto"``.
        ranks: How several processes train together: ``"average"``, ``"ddp"``, ``"fsdp"``, ``"alone"``, or
            :class:`gradbalance.distributed.Ranks`. Has to be given where several ranks run. Each call then checks that
            they are set up alike; :class:`~gradbalance.BalancedOptimizer` does so once.

    Returns:
        Weights, Gramian, cosines and more; see :class:`~gradbalance.BalanceInfo`.

    Raises:
        InvalidArgumentError: Losses or params of a wrong form.
        NonFiniteError: A loss or a row is NaN or Inf; names the objectives. The balancer is untouched, and nothing is
            written; on several ranks, which look when they meet, plain gradients are, and those of cached steps. On
            cached steps losses are checked on the CPU only: elsewhere looking would stall the device.
        CollectorError: Rows cannot be collected.
        RanksError: Several ranks that are not set up alike, or ``ranks`` was not given.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> losses = {"a": 3 * weight[0], "b": 4 * weight[1]}
    >>> info = backward(losses, [weight], lambda gram: gram.diagonal().rsqrt())
    >>> weight.grad, info.norms.tolist()
    (tensor([1., 1.]), [3.0, 4.0])
    """
    balanced = balanced_parameters(params)
    objectives = as_objectives(losses)
    check_extra_loss(extra_loss)
    check_collector(collector)
    team = resolved(as_ranks(ranks), balanced)
    if team.several or team.mode == "fsdp":
        return _on_ranks(objectives, balanced, balancer, extra_loss, collector, team)

    graph = explore(objectives.roots, extra_loss)
    refresh = needs_rows(balancer)
    if refresh or objectives.values.device.type == "cpu":
        objectives.require_finite(extra_loss)

    gram, choice = None, None
    if refresh:
        outside = plain_gradients(objectives, balanced, graph, extra_loss)
        rows = Rows(balanced, len(objectives))
        choice = collect(objectives, rows, graph, collector=collector, check=graph.unchecked)
        gram = without_faint_rows(rows.gramian(), rows.blocks)
        require_finite_rows(gram, objectives.names)
        weights = solve(balancer, gram)
        rows.add_to_grad(weights)
        add_all(outside)
    else:
        weights = cached_weights(balancer, len(objectives))
        backward_scalarized(objectives, [(weights, balanced)], graph, extra_loss)

    info = describe(objectives.names, weights, objectives.values, objectives.active, balancer, gram, choice)
    count_step(balancer)
    return info


def _on_ranks(
    objectives: Objectives,
    balanced: tuple[Tensor, ...],
    balancer: BalancerLike,
    extra_loss: Tensor | None,
    collector: Collector,
    ranks: Ranks,
) -> BalanceInfo:
    """The same road with a meeting of the ranks before rows are combined: a cycle of one micro-batch."""
    if ranks.several:
        objectives = objectives.aligned(
            agree(objectives.names, balanced, {"rows are due": needs_rows(balancer)}, ranks)
        )
    cycle = Cycle(
        objectives,
        [Group("", balancer, balanced)],
        collector=collector,
        scaler=None,
        skip=False,
        on_rows=None,
        plain=(),
        ranks=ranks,
    )
    cycle.add(objectives, extra_loss, check=True)
    info = cycle.finish(verify=True)
    count_step(balancer)
    return info
