"""One decode step of a fixed number of requests, entirely on the device.

``target`` runs the anchors and drafts of all requests through the target; ``verify`` keeps the drafts that
pass, makes the token after them the new anchor and says which captured rows the draft may see; ``draft``
inserts those rows into the draft's rings and drafts the next block. Each reads its inputs from
:class:`SlotState` and from static tensors, and leaves its results there, so the three can be captured as
they are and replayed one after the other. What was emitted goes to the host as one small copy after
``verify``, which the host reads while the draft runs.

Without a draft, a step has one row per request: its anchor goes through the target, which chooses the next one.

Padding requests have slot -1: their rows enter no cache, they share the state's spare row, and nobody
reads what they emit. Drafts after a request's limit are run and never kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .distributions import plain_target_probabilities
from .keyed_noise import gumbel_sample, step_seeds
from .session import Session, make_outputs
from .slots import SlotState
from .verification import Method, greedy_outcome, outcome, step_distributions


class DeviceStep:
    """The three parts of a step of ``requests`` requests, R below, with N drafts each.

    Args:
        draft: None to decode with the target alone.
        rings: of target and of draft, the caches that the sessions update.
        method: how sampled requests are verified; None if all are greedy.
        fault: int32 [1] that goes to the host with the emitted tokens.
    """

    def __init__(
        self,
        target: Session,
        draft: Session | None,
        rings: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        state: SlotState,
        requests: int,
        method: Method | None,
        *,
        fault: Tensor | None = None,
    ):
        self._target, self._draft, self._state, self._method = target, draft, state, method
        self.requests, self._drafts = requests, state.drafts.shape[1]
        device, width = state.anchors.device, self._drafts + 1
        rows = requests * width

        def integers(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self.slots = integers(requests)
        self._offsets = torch.arange(width, dtype=torch.int32, device=device)
        self._fault = torch.zeros(1, dtype=torch.int32, device=device) if fault is None else fault
        # Per request how many drafts were kept and N + 1 tokens; then the fault.
        self._report = integers(requests * (1 + width) + 1)
        # Pinned, so that the copy is asynchronous.
        self._host_report = torch.empty_like(self._report, device="cpu", pin_memory=device.type == "cuda")
        self._seen = {name: integers(rows) for name in ("input_ids", "positions", "slots")}
        self._target_inputs = {**self._seen, **rings[0]}
        self._target_outputs = make_outputs(target, self._target_inputs, rings[0])
        self._context = {name: integers(rows) for name in ("feature_positions", "feature_slots")}
        if draft is None:
            return
        self._block = {name: integers(requests) for name in ("anchor_ids", "positions", "slots")}
        self._keys: dict[str, Tensor] = {}
        if state.draft_logits is not None:
            self._keys["temperature"] = torch.zeros(requests, dtype=torch.float32, device=device)
            self._keys["seeds"] = integers(requests, 2)
        features = {"target_features": self._target_outputs["target_features"]}
        self._draft_inputs = {**self._block, **features, **self._context, **self._keys, **rings[1]}
        self._draft_outputs = make_outputs(draft, self._draft_inputs, rings[1])

    def place(self, slots: Sequence[int]) -> None:
        """Say which requests the next steps are for; fewer than ``requests`` are padded."""
        padded = [*slots, *[-1] * (self.requests - len(slots))]
        self.slots.copy_(torch.tensor(padded, dtype=torch.int32), non_blocking=True)

    def target(self) -> None:
        """Run anchors and drafts, R * (N + 1) rows, through the target; its caches are updated in place.

        Reads the placed requests' anchors, drafts and positions from the state; leaves ``logits`` [R * (N + 1), V]
        float32 and ``target_features`` in static tensors, for :meth:`verify` and :meth:`draft`. Does not wait for the
        device.

        Raises:
            SessionError, EngineRunError: the target does not take the call.
        """
        state, rows = self._state, self._state.rows(self.slots)
        ids = torch.cat((state.anchors[rows].unsqueeze(1), state.drafts[rows]), 1)
        positions = state.positions[rows].unsqueeze(1) + self._offsets
        values = {"input_ids": ids, "positions": positions, "slots": self.slots.unsqueeze(1).expand_as(ids)}
        for name, value in values.items():
            self._seen[name].copy_(value.flatten())
        self._target.run(self._target_inputs, self._target_outputs)

    def verify(self) -> None:
        """Decide what the rows of the last :meth:`target` emit, and make each request's last emitted token its anchor.

        Updates anchors and positions [R] of the state, marks the kept rows as the draft's context (slot -1 for the
        others), and starts the copy of the emitted tokens and the fault to the host. Does not wait for it.
        """
        state, rows = self._state, self._state.rows(self.slots)
        anchors, drafts = state.positions[rows], state.drafts[rows]
        logits = self._target_outputs["logits"].unflatten(0, (self.requests, -1))
        tokens = torch.where(self._offsets[:-1] < state.limits[rows].unsqueeze(1), drafts, -1)
        if self._method is None:
            kept, bonus = greedy_outcome(tokens, logits)
        else:
            temperature = state.temperature[rows]
            cached = None if state.draft_logits is None else state.draft_logits[rows]
            target = plain_target_probabilities(logits, temperature)
            step = step_distributions(self._method, target, tokens, cached, temperature)
            kept, bonus = outcome(step, self._method, gumbel_sample, step_seeds(state.seeds[rows], anchors), anchors)
        kept, bonus = kept.to(torch.int32), bonus.to(torch.int32)
        column = kept.unsqueeze(1)
        emitted = torch.where(self._offsets[:-1] < column, drafts, bonus.unsqueeze(1))
        emitted = torch.cat((emitted, bonus.unsqueeze(1)), 1)
        self._report.copy_(torch.cat((torch.cat((column, emitted), 1).flatten(), self._fault)))
        self._host_report.copy_(self._report, non_blocking=True)
        # The rows of the old anchor and of the kept drafts are the context that the draft gets to see.
        seen = self._offsets <= column
        self._context["feature_slots"].copy_(torch.where(seen, self.slots.unsqueeze(1), -1).flatten())
        self._context["feature_positions"].copy_((anchors.unsqueeze(1) + self._offsets).flatten())
        state.anchors[rows], state.positions[rows] = bonus, anchors + kept + 1

    def draft(self) -> None:
        """Insert the kept rows into the draft's rings and draft N tokens per request from its anchor.

        Updates the state's ``drafts`` [R, N] int32 and, if ``method`` is set and the draft has that output,
        ``draft_logits`` [R, N, V] float32. Does not wait for the device. A step without a draft has no such part.

        Raises:
            SessionError, EngineRunError: the draft does not take the call.
        """
        assert self._draft is not None
        state, rows = self._state, self._state.rows(self.slots)
        positions = state.positions[rows]
        for name, value in {"anchor_ids": state.anchors[rows], "positions": positions, "slots": self.slots}.items():
            self._block[name].copy_(value)
        if self._keys:
            self._keys["temperature"].copy_(state.temperature[rows])  # rounded to float32
            self._keys["seeds"].copy_(step_seeds(state.seeds[rows], positions))
        self._draft.run(self._draft_inputs, self._draft_outputs)
        state.drafts[rows] = self._draft_outputs["draft_tokens"]
        if state.draft_logits is not None and self._method is not None:
            state.draft_logits[rows] = self._draft_outputs["draft_logits"]

    def emitted(self, requests: int) -> list[list[int]]:
        """Tokens that the last ``verify`` emitted for the first ``requests``; its copy must have arrived."""
        rows = self._host_report[:-1].view(self.requests, -1)[:requests].tolist()
        return [row[1 : row[0] + 2] for row in rows]

    def fault(self) -> int:
        """The fault as the last ``verify`` saw it."""
        return int(self._host_report[-1])
