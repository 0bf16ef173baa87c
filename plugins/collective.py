"""Gives networks in torch the collectives that no kernel provides.

Kernels between ranks use the mailbox; their torch references, and a loop that is split by requests, need some other
way. Whoever runs a rank-local network provides one for the time of the call::

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
AllToAll = Callable[[Tensor], Tensor]
"""[tp, ...] on each rank, a part for every rank -> [tp, ...], the parts for this rank in rank order."""


class CollectiveError(RuntimeError):
    """A network of several ranks ran without their collectives, or with those of another number of ranks."""


_current: ContextVar[tuple[AllGather, AllToAll | None] | None] = ContextVar("dspark_collectives", default=None)


@contextmanager
def collective_scope(all_gather: AllGather, all_to_all: AllToAll | None = None) -> Iterator[None]:
    """Provide collectives to everything inside the ``with`` block; ``all_gather`` stands in for a missing second."""
    token = _current.set((all_gather, all_to_all))
    try:
        yield
    finally:
        _current.reset(token)


def gather_ranks(tensor: Tensor, tp_size: int) -> Tensor:
    """``tensor`` of every rank, [tp, ...] in rank order.

    Raises:
        CollectiveError: no collective scope is open, or it serves another number of ranks.
    """
    if tp_size == 1:
        return tensor.unsqueeze(0)
    return _checked(_collectives(tp_size)[0](tensor), tp_size)


def exchange_ranks(tensor: Tensor, tp_size: int, rank: int) -> Tensor:
    """What every rank has for this one, [tp, ...] in rank order; ``tensor`` [tp, ...] is what this one has for each.

    Raises:
        CollectiveError: as :func:`gather_ranks`.
    """
    if tp_size == 1:
        return tensor
    all_to_all = _collectives(tp_size)[1]
    return gather_ranks(tensor, tp_size)[:, rank] if all_to_all is None else _checked(all_to_all(tensor), tp_size)


def _collectives(tp_size: int) -> tuple[AllGather, AllToAll | None]:
    collectives = _current.get()
    if collectives is None:
        raise CollectiveError(
            f"a network sharded over {tp_size} ranks ran outside collective_scope(); "
            "run it through a Session, or open the scope with an all_gather of your own"
        )
    return collectives


def _checked(gathered: Tensor, tp_size: int) -> Tensor:
    if gathered.shape[0] != tp_size:
        raise CollectiveError(
            f"the collective scope gathered {gathered.shape[0]} ranks, the network has {tp_size}; open the scope with "
            "the collectives of as many ranks"
        )
    return gathered
