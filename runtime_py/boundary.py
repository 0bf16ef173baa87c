"""Decides how the boundaries between sublayers run: fused, through the mailbox, or as separate "stock" operations.

The fused operation waits for its peers on the GPU, so if one rank takes the other path, the rest wait for ever.
:func:`plan` therefore uses only values that are equal on all ranks: the rows of the call, and the :class:`Facts` that
the ranks exchanged at the start.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum

import torch

from ..plugins.mhc_all_reduce import MAILBOX_ROWS
from ..plugins.op import ACTIVATION_DTYPES
from .communicator import Communicator
from .mailbox import NAMED_RANKS, RANKS

FUSED_MHC_MAX_ROWS = MAILBOX_ROWS
"""Most rows of a fused boundary between several ranks: what the mailbox holds."""


class BoundaryError(RuntimeError):
    """The ranks of a job are set up for different boundaries."""


class Route(str, Enum):
    """A boundary is one kernel that exchanges through the mailbox, or NCCL and separate operations."""

    FUSED = "fused"
    STOCK = "stock"


@dataclass(frozen=True)
class BoundaryPlan:
    """The route of one call's boundaries, and the reason in half a sentence."""

    route: Route
    reason: str


@dataclass(frozen=True)
class Facts:
    """What the path of boundaries depends on, the same on every rank. Made by :meth:`gather`."""

    ranks: int
    nodes: int
    dtype: torch.dtype
    """Of the activations."""
    mailbox_problem: str
    """Why there is no mailbox; "" if there is one."""

    @classmethod
    def gather(cls, communicator: Communicator, dtype: torch.dtype, mailbox_problem: str = "") -> Facts:
        """The facts of a job; every rank calls this with what it knows itself.

        Args:
            mailbox_problem: the message of the :class:`~.mailbox.MailboxError` that this rank met, or "".

        Raises:
            BoundaryError: the same on every rank: their activation types differ.
        """
        everyone = communicator.all_gather_object((socket.gethostname(), dtype, mailbox_problem))
        hosts, dtypes, problems = zip(*everyone, strict=True)
        if len(set(dtypes)) > 1:
            listed = ", ".join(f"rank {r} {found}" for r, found in enumerate(dtypes))
            raise BoundaryError(f"activation types are {listed}; expected one, build the engines of all ranks alike")
        told = [f"rank {r}: {problem}" for r, problem in enumerate(problems) if problem]
        return cls(len(hosts), len(set(hosts)), dtype, told[0] if told else "")


def plan(rows: int, facts: Facts) -> BoundaryPlan:
    """The route of a call of ``rows`` rows; a pure function, so all ranks get the same result."""
    if facts.ranks == 1:
        return BoundaryPlan(Route.FUSED, "one rank has nothing to exchange")
    if facts.nodes > 1:
        return BoundaryPlan(Route.STOCK, f"{facts.nodes} nodes share no memory")
    if facts.ranks not in RANKS:
        return BoundaryPlan(Route.STOCK, f"the mailbox is made for {NAMED_RANKS}, not {facts.ranks}")
    if facts.dtype not in ACTIVATION_DTYPES:
        return BoundaryPlan(Route.STOCK, f"the mailbox does not carry {facts.dtype}")
    if facts.mailbox_problem:
        return BoundaryPlan(Route.STOCK, f"there is no mailbox: {facts.mailbox_problem}")
    if rows > FUSED_MHC_MAX_ROWS:
        return BoundaryPlan(Route.STOCK, f"{rows} rows are more than the {FUSED_MHC_MAX_ROWS} of the mailbox")
    return BoundaryPlan(Route.FUSED, f"{rows} rows fit the mailbox of {facts.ranks} ranks")
