"""What a balancer is: a function from the Gramian of K rows to K weights on the raw rows."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Balancer(Protocol):
    """Any callable from a Gramian to weights.

    The direction given to the optimizer is ``sum_k c_k g_k`` with the raw (unnormalized) rows g and the weights c.

    Example:
        >>> def loudest(gram: Tensor) -> Tensor:
        ...     return (gram.diagonal() == gram.diagonal().max()).double()
        >>> isinstance(loudest, Balancer)
        True
    """

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Weights on the raw rows.

        Args:
            gram: G, shape [K, K], any floating dtype and device.

        Returns:
            c, shape [K]; the balancers of this library give float64 on the CPU, and the caller moves it.
        """
        ...


class ConstantBalancer(Protocol):
    """A balancer whose weights do not depend on the rows, so that no step has to collect them."""

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Weights on the raw rows, the same for every Gramian of K rows."""
        ...

    def weights_for(self, count: int) -> Tensor:
        """The weights for ``count`` objectives, shape [count], float64 on the CPU."""
        ...


class StatefulBalancer(Protocol):
    """A balancer that remembers: it need not see the rows on every optimizer step.

    One optimizer step goes: if ``needs_rows``, form the rows, call the balancer with their Gramian (a refresh) and use
    the weights it returns; otherwise use ``weights`` in one backward pass of ``sum_k c_k loss_k``. Then, in both cases,
    call ``step()`` exactly once. A step that the optimizer skips (an overflow under a GradScaler) is no step.

    To tell a stateful balancer at run time, ask ``hasattr(balancer, "needs_rows")``.
    """

    def __call__(self, gram: Tensor, /) -> Tensor:
        """Refresh: weights on the raw rows, from their Gramian."""
        ...

    @property
    def needs_rows(self) -> bool:
        """Whether a refresh is due on this step."""
        ...

    @property
    def weights(self) -> Tensor:
        """Weights for a step without refresh, shape [K], float64. Raises StateError before the first solve."""
        ...

    @property
    def coefficients(self) -> Tensor | None:
        """Simplex numbers behind the weights in use on this step, shape [K]; None before the first solve."""
        ...

    def step(self) -> None:
        """Tell that one optimizer step has been made."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers, strings and lists: it survives JSON bit for bit."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises StateError if it does not fit, leaving the own state as it was."""
        ...
