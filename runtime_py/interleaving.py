"""Decode steps on one stream: target, verification, draft, target, verification, draft, without the host.

For each request count of a list there is one :class:`~.device_step.DeviceStep`. It is captured once, in two graphs
(target with verification, and draft), and replayed from then on. A batch takes the smallest step that holds it; the
rest is padding. The host enqueues both graphs, waits for an event between them, and reads the few emitted numbers while
the draft is still running. So between two steps the stream waits only for the host's own bookkeeping. Without a draft
there is no second graph.

A batch may decode here if its decisions need nothing that only the host knows: :func:`why_not` names the obstacle. The
choice of a step depends on the number of requests and their parameters, which are the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .boundary import FUSED_MHC_MAX_ROWS
from .clock import GAP, HostMark, Mark, StepClock, StreamMark
from .cuda_graphs import WARM_UP_RUNS, GraphPool
from .device_step import DeviceStep
from .host_step import Span
from .keyed_noise import gumbel_sample
from .requests import Request
from .scheduling import FullLength, Scheduler
from .session import Session
from .slots import SlotState
from .verification import Verifier
from .watchdog import Progress

logger = logging.getLogger(__name__)


def request_counts(max_batch_size: int) -> tuple[int, ...]:
    """The request counts that are captured unless told otherwise: powers of two, and the largest batch."""
    powers = (1 << i for i in range(max_batch_size.bit_length()))
    return tuple(sorted({*powers, max_batch_size}))


def why_not(requests: Sequence[Request], scheduler: Scheduler, verifier: Verifier) -> str | None:
    """What keeps a batch from being decided on the device, in half a sentence; None if nothing does."""
    if not isinstance(scheduler, FullLength):
        return f"{type(scheduler).__name__} chooses the lengths to verify on the host"
    if verifier.sampler is not gumbel_sample:
        return "a sampler of the caller's own runs on the host"
    if any(r.params.penalizes for r in requests):
        return "penalties depend on a request's tokens, which the host has"
    if any(r.params.restricts for r in requests):
        return "top-k, top-p and min-p are applied on the host"
    return None


def low_batch_problem(counts: Sequence[int], rows_per_request: int) -> str | None:
    """The warning for a start at which no captured request count is small enough for the fused boundaries of several
    ranks; None if one is."""
    if not counts or min(counts) * rows_per_request <= FUSED_MHC_MAX_ROWS:
        return None
    return (
        f"no captured step uses the fused boundaries: the smallest, of {min(counts)} requests, has "
        f"{min(counts) * rows_per_request} rows, they take {FUSED_MHC_MAX_ROWS}; "
        f"add {FUSED_MHC_MAX_ROWS // rows_per_request} to --request-counts"
    )


@dataclass(frozen=True)
class Parts:
    """A step as it is enqueued."""

    step: DeviceStep
    decide: Callable[[], None]
    """Target and verification."""
    draft: Callable[[], None] | None
    decided: Mark
    """The end of the target within ``decide``, where verification begins."""


@dataclass(frozen=True)
class StepPlan:
    """How a batch is decoded: with a step of ``requests`` requests, replayed from graphs or enqueued anew."""

    requests: int
    captured: bool


class Interleaver:
    """The device's steps of one rank.

    Args:
        draft: None to decode with the target alone.
        rings: caches of target and draft.
        counts: request counts to capture; larger batches are enqueued call by call.
        verifier: its method serves batches with a sampled request.
        stream: the rank's stream; None on a CPU, where nothing is captured.
        fault: int32 [1] on the device, of the mailbox; anything but zero ends the step with ``on_fault``.
    """

    def __init__(
        self,
        target: Session,
        draft: Session | None,
        rings: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        state: SlotState,
        *,
        counts: Sequence[int],
        verifier: Verifier,
        stream: torch.cuda.Stream | None = None,
        fault: Tensor | None = None,
        on_fault: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
    ):
        self.state, self._sessions, self._rings, self._verifier = state, (target, draft), rings, verifier
        self._counts, self._stream, self._fault, self._on_fault = tuple(sorted(set(counts))), stream, fault, on_fault
        self._pool, self._progress = GraphPool(stream) if stream else None, progress or Progress()
        self._parts: dict[tuple[int, bool], Parts] = {}
        self._placed: tuple[DeviceStep, list[int]] | None = None
        self.clock = StepClock(StreamMark if stream else HostMark)
        self.span: Span = nullcontext

    def plan(self, requests: int) -> StepPlan:
        """How a batch of so many requests is decoded; depends on nothing else."""
        fitting = [count for count in self._counts if count >= requests]
        return StepPlan(fitting[0], self._pool is not None) if fitting else StepPlan(requests, False)

    def capture(self, *, sampled: bool) -> None:
        """Warm up and capture the steps of all counts, the largest first, for greedy or for sampled batches."""
        for count in reversed(self._counts):
            self._prepare(StepPlan(count, self._pool is not None), sampled)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Enqueue one step of ``requests``, whose state the device has; return what each emitted.

        Raises:
            GraphError: a step that was not captured yet can't be.
        """
        sampled = any(not r.params.greedy for r in requests)
        parts, clock = self._prepare(self.plan(len(requests)), sampled), self.clock
        step, slots = parts.step, [r.slot for r in requests]
        if self._placed != (step, slots):
            clock.pause()
            step.place(slots)
            self._placed = (step, slots)
        self._progress.enqueued(f"target and verification of {step.requests} requests, on the device")
        clock.mark("target")
        with self.span("target and verify"):
            parts.decide()
        phases = [("verify", parts.decided)]
        arrived = torch.cuda.Event() if self._stream else None
        if arrived:
            arrived.record()
        if parts.draft:
            phases.append(("draft", clock.now()))
            self._progress.enqueued(f"draft of {step.requests} requests, on the device")
            with self.span("draft"):
                parts.draft()
        phases.append((GAP, clock.now()))
        if arrived:
            arrived.synchronize()
        for phase, mark in phases:
            clock.mark(phase, mark)
        if step.fault():
            self._on_fault()
        return step.emitted(len(requests))

    def pause(self) -> None:
        """Other work follows on the stream."""
        self.clock.pause()

    def _prepare(self, plan: StepPlan, sampled: bool) -> Parts:
        key = (plan.requests, sampled)
        if key not in self._parts:
            self.clock.pause()
            method = self._verifier.method if sampled else None
            step = DeviceStep(*self._sessions, self._rings, self.state, plan.requests, method, fault=self._fault)
            decided = self.clock.now()

            def decide() -> None:
                step.target()
                decided.renew()
                step.verify()

            parts = Parts(step, decide, step.draft if self._sessions[1] else None, decided)
            what = f"{plan.requests} {'sampled' if sampled else 'greedy'} requests"
            self._parts[key] = self._captured(parts, what, self._pool) if plan.captured and self._pool else parts
        return self._parts[key]

    def _captured(self, parts: Parts, what: str, pool: GraphPool) -> Parts:
        self._placed = None
        with self._progress.operation(f"capture of {what}"):
            parts.step.place([])
            # Target and draft together, as they will run: each has its first run after the other's.
            for _ in range(WARM_UP_RUNS):
                parts.decide()
                if parts.draft:
                    parts.draft()
            decide = pool.capture(parts.decide, f"target and verification of {what}")
            draft = pool.capture(parts.draft, f"draft of {what}") if parts.draft else None
        return replace(parts, decide=decide, draft=draft)
