"""What the device knows of the requests in flight, so that a step needs nothing from the host.

Everything is kept by cache slot, and a step finds its requests through a list of slots: requests may come,
go and change places without a tensor being moved. One more row than there are slots stands for padding:
slot -1 reads and writes it, so a step of a fixed number of requests can carry fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .keyed_noise import seed_words
from .requests import Request


class SlotState:
    """Anchor, position, drafts and sampling parameters of the request in each slot.

    Args:
        slots: cache slots of the engines.
        drafts: drafted tokens per step, N; 0 without a draft.
        draft_logits: [slots + 1, N, V] float32, pre-temperature logits of the last drafts of sampled requests;
            None if the draft does not return any.
    """

    def __init__(self, slots: int, drafts: int, draft_logits: Tensor | None, device: torch.device):
        rows = slots + 1

        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int32, device=device)

        self.spare = slots
        self.anchors, self.positions, self.limits = integers(), integers(), integers()
        self.drafts, self.seeds = integers(drafts), integers(2)
        self.temperature = torch.zeros(rows, dtype=torch.float64, device=device)
        self.draft_logits = draft_logits

    def rows(self, slots: Tensor) -> Tensor:
        """Where the requests in ``slots`` [R] int32 are kept, int64; padding has the spare row."""
        return torch.where(slots < 0, self.spare, slots).long()

    def enter(self, requests: Sequence[Request], limits: Sequence[int]) -> None:
        """Take over requests whose anchor and drafts the host knows; a step may verify up to ``limits`` drafts."""
        device, columns = self.anchors.device, self.drafts.shape[1]
        slots = torch.tensor([r.slot for r in requests])
        words = [[r.tokens[-1], r.anchor_position, limit] for r, limit in zip(requests, limits, strict=True)]
        drafts = [r.drafts + [0] * (columns - len(r.drafts)) for r in requests]
        parts = (torch.tensor(words), torch.tensor(drafts, dtype=torch.int64), seed_words([r.seed for r in requests]))
        packed = torch.cat(parts, 1)
        packed, where = packed.to(torch.int32).to(device), slots.to(device)
        self.anchors[where], self.positions[where], self.limits[where] = packed[:, :3].unbind(1)
        self.drafts[where], self.seeds[where] = packed[:, 3:-2], packed[:, -2:]
        temperature = torch.tensor([r.params.temperature for r in requests], dtype=torch.float64)
        self.temperature[where] = temperature.to(device)
