"""Many calls that ranks make together, as CUDA graphs that are replayed in random order.

A graph holds calls of different sizes and counts on the GPU what each left wrong, so that thousands of calls take no
host in between. Another order than the captured one lets a call meet what any other left in the mailbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from dspark_trt.runtime_py.mailbox import Mailbox
from torch import Tensor


class CheckedCall(Protocol):
    """A call whose outputs are known."""

    def run(self) -> None:
        """Launch, wait and check."""

    def launch(self) -> None:
        """Enqueue; may be captured."""

    def differences(self) -> Tensor:
        """How many values of the outputs are wrong, on the GPU."""


def values_that_differ(box: Mailbox, sets: Sequence[Sequence[CheckedCall]], replays: int, seed: int) -> int:
    """How many values were wrong in so many replays; of ``sets`` each is a graph, ``seed`` gives their order.

    Raises:
        MailboxError: a rank did not come.
    """
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    graphs = []
    for calls in sets:
        for call in calls:
            call.run()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                call.launch()
                bad.add_(call.differences())
        graphs.append(graph)
    order = torch.Generator().manual_seed(seed)
    for replay in range(1, replays + 1):
        graphs[int(torch.randint(len(graphs), (), generator=order))].replay()
        if replay % 100 == 0:
            torch.cuda.synchronize()
            box.check()
    torch.cuda.synchronize()
    return int(bad)
