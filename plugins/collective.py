"""How a reference reaches the other ranks.

The all-reduce's kernel reads its peers through the mailbox; its torch reference needs some other way.
Whoever runs a rank-local network provides one for the time of the call::

    with collective_scope(communicator.all_gather):
        model(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

AllGather = Callable[[Tensor], Tensor]
"""[...] on each rank -> [tp, ...] on every rank, in rank order."""

_current: ContextVar[AllGather | None] = ContextVar("dspark_all_gather", default=None)


@contextmanager
def collective_scope(all_gather: AllGather) -> Iterator[None]:
    """Provide ``all_gather`` to every reference that runs inside the ``with`` block."""
    token = _current.set(all_gather)
    try:
        yield
    finally:
        _current.reset(token)


def gather_ranks(tensor: Tensor, tp_size: int) -> Tensor:
    """``tensor`` of every rank, [tp, ...] in rank order.

    Raises:
        RuntimeError: no collective scope is open, or it serves another number of ranks.
    """
    if tp_size == 1:
        return tensor.unsqueeze(0)
    all_gather = _current.get()
    if all_gather is None:
        raise RuntimeError(
            f"a network sharded over {tp_size} ranks ran outside collective_scope(); "
            "run it through a Session, or open the scope with an all_gather of your own"
        )
    gathered = all_gather(tensor)
    if gathered.shape[0] != tp_size:
        raise RuntimeError(f"the collective scope gathered {gathered.shape[0]} ranks, the network has {tp_size}")
    return gathered
