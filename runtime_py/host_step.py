"""Prefill, and decode steps in which the host takes every decision.

A step runs the draft, then the target over [anchor, d1 .. dn] of every request, keeps the prefix of drafts
that verification accepts plus a token of the target's own (the new anchor), and queues the captured rows
of what was kept for the next draft. Rejected rows need no rollback: the target's ring is longer than its
window by more than a step, and the draft's ring only ever receives accepted rows.

Every rank computes the same. Where ranks could still differ, rank 0's drafts, lengths and verdicts are broadcast
and used by all, so that no rank waits alone in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .communicator import Communicator
from .keyed_noise import seed_words, step_seeds
from .requests import Request, Statistics
from .scheduling import Scheduler
from .session import Session, make_caches, make_outputs
from .verification import Verdict, Verifier
from .watchdog import Progress

Span = Callable[[str], AbstractContextManager[object]]
"""Marks what is enqueued inside it in a trace."""

Deliver = Callable[[Request, Sequence[int]], int]
"""Takes a request and its new tokens; returns how many of them it kept."""


class LockstepError(RuntimeError):
    """The ranks of a job came to different tokens."""


class HostStep:
    """Target and draft with their caches, on one device.

    Args:
        context_window: rows of the target that a draft can still see.
        target_window: rows of one request that a call of the target may carry.
        max_rows: rows of one call of the target, all requests together.
        max_context_rows: context rows of one call of the draft, all requests together.
        slots: cache slots.
        check_fault: raises if what the device computed is void. Asked after every call of the target, and so before any
            token is emitted.
    """

    def __init__(
        self,
        target: Session,
        draft: Session | None,
        *,
        context_window: int,
        target_window: int,
        max_rows: int,
        max_context_rows: int,
        slots: int,
        communicator: Communicator,
        verifier: Verifier,
        device: torch.device,
        check_lockstep: bool,
        progress: Progress,
        check_fault: Callable[[], None],
    ):
        self.target, self.draft, self._device, self._progress = target, draft, device, progress
        self._check_fault = check_fault
        self.span: Span = nullcontext
        self._context_window, self._target_window, self._max_rows = context_window, target_window, max_rows
        self._max_context_rows = max_context_rows
        self._communicator, self.verifier, self._check_lockstep = communicator, verifier, check_lockstep
        self.rings = make_caches(target, device), make_caches(draft, device) if draft else {}
        self.drafts = drafted_tokens(draft) if draft else 0
        # Pre-temperature logits of the last drafts, by slot, so that a request keeps its rows wherever it stands
        # in a batch; only sampled requests write theirs. A draft without that output drafts greedily. The row
        # after the last slot is for padding.
        logits = [o for o in draft.io.outputs if o.name == "draft_logits"] if draft else []
        shapes = [(slots + 1, *(int(size) for size in o.shape[1:])) for o in logits]
        self.draft_logits = torch.zeros(shapes[0], device=device) if shapes else None

    def prefill(self, requests: Sequence[Request], stats: Statistics) -> list[int]:
        """Run the prompts through the target; return the first token of each."""
        started = time.perf_counter()
        cursor = dict.fromkeys((r.slot for r in requests), 0)
        first: dict[int, int] = {}
        while pending := [r for r in requests if cursor[r.slot] < r.prompt_length]:
            budget, chunks = self._max_rows, []
            for request in pending:
                size = min(self._target_window, request.prompt_length - cursor[request.slot], budget)
                if size:
                    chunks.append((request, cursor[request.slot], size))
                    budget -= size
            rows = [(r, p) for r, start, size in chunks for p in range(start, start + size)]
            logits, features = self._run_target(
                [r.tokens[p] for r, p in rows], [p for _, p in rows], [r.slot for r, _ in rows]
            )
            offset, ready = 0, []
            for request, start, size in chunks:
                self._add_context(request, start, features[offset : offset + size])
                offset += size
                cursor[request.slot] = start + size
                if start + size == request.prompt_length:
                    ready.append((request, offset - 1))
            if ready:
                # The first token: a step without drafts after the prompt's last token.
                last = [request for request, _ in ready]
                verdict = self._verify(last, logits[[row for _, row in ready]], None)
                first |= {r.slot: token for r, token in zip(last, verdict.bonus, strict=True)}
            stats.target_calls += 1
        stats.prefill_seconds += time.perf_counter() - started
        return [first[r.slot] for r in requests]

    def run(self, active: Sequence[Request], scheduler: Scheduler, stats: Statistics, deliver: Deliver) -> None:
        """Draft, verify and deliver once for every active request."""
        requests = list(active)
        if self.draft:
            started = time.perf_counter()
            self.run_draft(requests, scheduler)
            stats.draft_calls += 1
            stats.draft_seconds += time.perf_counter() - started
        started = time.perf_counter()
        rows = [(t, r.anchor_position + j, r.slot) for r in requests for j, t in enumerate([r.tokens[-1], *r.drafts])]
        logits, features = self._run_target(*([row[i] for row in rows] for i in range(3)))
        stats.target_calls += 1
        stats.target_seconds += time.perf_counter() - started
        started = time.perf_counter()
        cached = None if self.draft_logits is None else self.draft_logits[[r.slot for r in requests]]
        verdict = self._verify(requests, logits, cached)
        stats.verify_seconds += time.perf_counter() - started
        lengths = [len(r.drafts) for r in requests]
        if self.draft:
            scheduler.record(lengths, verdict.accepted)
        offset = 0
        for request, length, accepted, bonus in zip(requests, lengths, verdict.accepted, verdict.bonus, strict=True):
            self._add_context(request, request.anchor_position, features[offset : offset + accepted + 1])
            offset += length + 1
            stats.record(length, accepted, deliver(request, [*request.drafts[:accepted], bonus]))

    def run_draft(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        """Insert what the requests' contexts hold into the rings and draft a block for each."""
        while sum(_rows_of(r) for r in requests) > self._max_context_rows:
            self._insert_context(requests)
        outputs = self._call_draft(requests, [_rows_of(r) for r in requests])
        lengths = scheduler.lengths(outputs["confidence"].cpu(), [self.limit(r) for r in requests])
        chosen = [d[:n] for d, n in zip(outputs["draft_tokens"].tolist(), lengths, strict=True)]
        for i, (request, drafts) in enumerate(zip(requests, self._communicator.broadcast(chosen), strict=True)):
            request.drafts, request.context = drafts, None
            if self.draft_logits is not None and not request.params.greedy:
                self.draft_logits[request.slot] = outputs["draft_logits"][i]

    def _insert_context(self, requests: Sequence[Request]) -> None:
        """Insert as much of the contexts as a call takes, oldest rows first; nobody reads what that call drafts."""
        budget, taken = self._max_context_rows, []
        for request in requests:
            if size := min(_rows_of(request), budget):
                taken.append((request, size))
                budget -= size
        self._call_draft([request for request, _ in taken], [size for _, size in taken])
        for request, size in taken:
            assert request.context is not None
            request.context, request.context_start = request.context[size:], request.context_start + size

    def _call_draft(self, requests: Sequence[Request], taken: Sequence[int]) -> dict[str, Tensor]:
        """The draft's outputs for ``requests``, after the first ``taken`` rows of their contexts."""
        assert self.draft is not None
        rows = [(r.context_start + i, r.slot) for r, size in zip(requests, taken, strict=True) for i in range(size)]
        features = [r.context[:size] for r, size in zip(requests, taken, strict=True) if r.context is not None]
        if not rows:  # a call takes at least a step of one request: rows that go nowhere
            info = next(i for i in self.draft.io.inputs if i.name == "target_features")
            features = [torch.zeros(self.drafts + 1, int(info.shape[1]), dtype=info.dtype, device=self._device)]
            rows = [(0, -1)] * (self.drafts + 1)
        positions = self._ids([r.anchor_position for r in requests])
        inputs = {
            "anchor_ids": self._ids([r.tokens[-1] for r in requests]),
            "positions": positions,
            "slots": self._ids([r.slot for r in requests]),
            "target_features": torch.cat(features),
            "feature_positions": self._ids([position for position, _ in rows]),
            "feature_slots": self._ids([slot for _, slot in rows]),
            **self.rings[1],
        }
        if self.draft_logits is not None:
            temperature = torch.tensor([r.params.temperature for r in requests], dtype=torch.float32)
            inputs["temperature"] = temperature.to(self._device)
            inputs["seeds"] = step_seeds(seed_words([r.seed for r in requests]).to(self._device), positions)
        outputs = make_outputs(self.draft, inputs, self.rings[1])
        self._progress.enqueued(f"draft of {len(requests)} requests")
        with self.span("draft"):
            self.draft.run(inputs, outputs)
        return outputs

    def limit(self, request: Request) -> int:
        """Drafts of a request that a step may verify."""
        own = request.params.num_draft_tokens
        return self.drafts if own is None else min(own, self.drafts)

    def _run_target(self, ids: list[int], positions: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
        rows = {"input_ids": self._ids(ids), "positions": self._ids(positions), "slots": self._ids(slots)}
        inputs = {**rows, **self.rings[0]}
        outputs = make_outputs(self.target, inputs, self.rings[0])
        self._progress.enqueued(f"target over {len(ids)} rows")
        with self.span("target"):
            self.target.run(inputs, outputs)
            # On the host, whatever the device: processors read the requests' tokens there.
            logits = outputs["logits"].cpu()
            self._check_fault()
        return logits, outputs["target_features"]

    def _verify(self, requests: Sequence[Request], logits: Tensor, draft_logits: Tensor | None) -> Verdict:
        cached = None if draft_logits is None else draft_logits.cpu()
        with self.span("verify"):
            verdict = self.verifier(requests, logits, cached)
        if self._check_lockstep:
            compare_ranks(self._communicator, [verdict.accepted, verdict.bonus])
        shared: Verdict = self._communicator.broadcast(verdict)
        return shared

    def _add_context(self, request: Request, start: int, features: Tensor) -> None:
        """Queue captured rows for the draft; only the last window can matter."""
        if request.context is None:
            request.context, request.context_start = features, start
        else:
            request.context = torch.cat((request.context, features))
        surplus = len(request.context) - self._context_window
        if surplus > 0:
            request.context, request.context_start = request.context[surplus:], request.context_start + surplus

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self._device)


def _rows_of(request: Request) -> int:
    """Context rows that the draft has not inserted yet."""
    return 0 if request.context is None else len(request.context)


def drafted_tokens(draft: Session) -> int:
    """Tokens that a draft proposes per request and step."""
    return int(next(o for o in draft.io.outputs if o.name == "draft_tokens").shape[1])


def compare_ranks(communicator: Communicator, decision: object) -> None:
    """Raise :class:`LockstepError`, on every rank, unless all ranks decided the same."""
    decisions = communicator.all_gather_object(decision)
    if any(d != decisions[0] for d in decisions):
        raise LockstepError(
            f"ranks decided differently: {dict(enumerate(decisions))}; "
            "the ranks must run the same package, weights and libraries, and engines of one dspark-build"
        )
