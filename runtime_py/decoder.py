"""Decodes prompts speculatively: admission, prefill, steps, delivery.

A request enters by prefill: its prompt goes through the target in chunks of at most one window, the
last row's choice becomes its anchor, and the captured features of the last window wait for the draft.
From then on each step runs the target over the anchor and drafts of every request, keeps what verification
accepts plus a token of the target's own, and drafts a new block after it.

There are two ways to run steps, with the same result. Where nothing needs the host, whole steps run on the
device, from CUDA graphs if it is a GPU (:mod:`.interleaving`). Everything else, such as penalties or a
schedule of the verified lengths, is decided by the host (:mod:`.host_step`). A batch may change from one to
the other between two steps.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..builder.build_config import BuildConfig
from ..builder.config import DraftConfig, TargetConfig
from ..builder.engine import dimension_ranges
from .communicator import Communicator
from .costs import CostTable, IdleSteps
from .host_step import Deliver, HostStep, Span, compare_ranks
from .interleaving import Interleaver, request_counts, why_not
from .requests import Completion, Request, RequestError, SamplingParams, Statistics, is_integer
from .scheduling import FullLength, Scheduler
from .session import Session
from .slots import SlotState
from .verification import Verifier
from .watchdog import Progress

Detokenize = Callable[[Sequence[int]], str]
OnTokens = Callable[[int, list[int]], None]
"""Called with a prompt's index and its new tokens, in order, as they are accepted."""


@dataclass(frozen=True)
class Execution:
    """Where sessions run, and what their steps share there."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stream: torch.cuda.Stream | None = None
    """Everything is enqueued on it; None on a CPU."""
    steps: Literal["auto", "device", "host"] = "auto"
    """Who decides steps that do not need the host; auto is the device on a GPU and the host on a CPU."""
    request_counts: Sequence[int] | None = None
    """Request counts whose steps are captured; None for powers of two up to the largest batch."""
    fault: Tensor | None = None
    """The mailbox's fault, int32 [1] on the device."""
    on_fault: Callable[[], None] = lambda: None
    """Raises when the fault is set."""
    max_rows: int | None = None
    """Rows of a call that the sessions take, where that is less than what the engines were built for."""
    progress: Progress = field(default_factory=Progress)
    """Is told what the decoder does; a :class:`~.watchdog.Watchdog` ends the job when that takes too long."""
    close: Callable[[], None] = lambda: None
    """Gives back what was opened for the sessions; every rank calls it."""


class Decoder:
    """Decodes prompts with a target and, unless ``speculative`` is off, a draft.

    ``scheduler`` decides how many drafts of each request a step verifies; one that weighs costs can be set
    when they have been measured::

        decoder.scheduler = EarlyStop(HeadAcceptance(), decoder.profile_costs())
    """

    def __init__(
        self,
        target: Session,
        draft: Session | None,
        *,
        target_config: TargetConfig,
        draft_config: DraftConfig,
        build: BuildConfig,
        communicator: Communicator,
        verifier: Verifier | None = None,
        scheduler: Scheduler | None = None,
        detokenize: Detokenize | None = None,
        check_lockstep: bool = False,
        execution: Execution | None = None,
    ):
        self.scheduler: Scheduler = scheduler or FullLength()
        self._verifier, self._detokenize = verifier or Verifier(), detokenize
        self._target_config, self._build, self._communicator = target_config, build, communicator
        self._execution = execution or Execution()
        self._host = HostStep(
            target,
            draft,
            context_window=draft_config.sliding_window,
            target_window=target_config.sliding_window,
            max_rows=min(build.max_input_len, self._execution.max_rows or build.max_input_len),
            max_context_rows=max(sizes["T"][2] for sizes in dimension_ranges("draft", draft_config, build).values()),
            slots=build.max_batch_size,
            communicator=communicator,
            verifier=self._verifier,
            device=self._execution.device,
            check_lockstep=check_lockstep,
            progress=self._execution.progress,
            check_fault=self._check_fault,
        )
        self._closed = False
        self._drafted = self._host.drafts
        # Requests whose anchor and drafts the device has.
        self._on_device: set[Request] = set()
        self.interleaver: Interleaver | None = None
        steps = self._execution.steps
        if steps == "device" or (steps == "auto" and self._execution.stream):
            counts = self._execution.request_counts
            state = SlotState(build.max_batch_size, self._drafted, self._host.draft_logits, self._execution.device)
            self.interleaver = Interleaver(
                target,
                draft,
                self._host.rings,
                state,
                counts=request_counts(build.max_batch_size) if counts is None else counts,
                verifier=self._verifier,
                stream=self._execution.stream,
                fault=self._execution.fault,
                on_fault=self._execution.on_fault,
                progress=self._execution.progress,
            )
        if self._execution.stream:
            # What was made so far was made on the default stream, which the other one does not wait for.
            torch.cuda.synchronize(self._execution.device)

    @classmethod
    def from_dir(cls, engine_dir: Path | str, **options: Any) -> Decoder:
        """A decoder over an engine directory; arguments and errors as of :func:`~.opening.open_decoder`."""
        from .opening import open_decoder

        return open_decoder(Path(engine_dir), **options)

    def capture(self) -> None:
        """Capture the steps of all request counts now, not when a batch first needs one; every rank calls it.

        Steps with sampled requests are captured where drafts are sampled, otherwise when a batch first has one.
        """
        self._check_open()
        if self.interleaver and self._execution.stream:
            with torch.inference_mode(), torch.cuda.stream(self._execution.stream):
                self.interleaver.capture(sampled=False)
                if self._build.sampling:
                    self.interleaver.capture(sampled=True)
            self._check_fault()

    def close(self) -> None:
        """Give back what the decoder holds outside of torch; every rank calls it. A closed decoder decodes no more."""
        if self._closed:
            return
        self._closed = True
        # Graphs first: NCCL waits for those that hold its work.
        self.interleaver = None
        with self._execution.progress.operation("giving back of what the ranks share"):
            self._execution.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing waits for the other ranks. A rank that fails ends the job, it does not wait.
        if kind is None:
            self.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_tokens: OnTokens | None = None,
    ) -> tuple[list[Completion], Statistics]:
        """Complete ``prompts`` (token ids); up to ``max_batch_size`` are in flight at once.

        Raises:
            RequestError: the decoder is closed; or naming every prompt that is empty, has ids outside the vocabulary,
                does not fit ``max_seq_len`` together with its ``max_tokens``, asks for more drafts than a block has, or
                has stop strings without a tokenizer; or, on every rank, that the ranks were given different prompts or
                parameters. Nothing runs then.
            LockstepError: the same on every rank: they came to different tokens.
            MailboxError: a rank stayed silent while another waited for it on its GPU.
            CostError: the costs that the scheduler weighs end below the size of a step.
            GraphError, EngineRunError: a step can't be captured, or TensorRT refused a call.
        """
        self._check_open()
        with torch.inference_mode(), torch.cuda.stream(self._execution.stream):
            return self._generate(prompts, params, on_tokens or (lambda index, tokens: None))

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        emit: OnTokens,
    ) -> tuple[list[Completion], Statistics]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        with self._execution.progress.operation("comparison of the ranks' prompts"):
            self._check_ranks(prompts, each)
            self._check(prompts, each)
            seeds = self._seeds(each)
        started = time.perf_counter()
        stats = Statistics(proposed_per_position=[0] * self._drafted, accepted_per_position=[0] * self._drafted)
        waiting = deque(enumerate(zip(prompts, each, seeds, strict=True)))
        free = list(range(self._build.max_batch_size))
        active: list[Request] = []
        done: dict[int, Completion] = {}
        progress, steps = self._execution.progress, itertools.count(1)
        self._on_device.clear()
        clocked = dict(self.interleaver.clock.seconds) if self.interleaver else {}

        def deliver(request: Request, produced: Sequence[int]) -> int:
            kept, reason = request.extend(produced)
            if kept:
                emit(request.index, kept)
            if reason:
                prompt, output = request.tokens[: request.prompt_length], request.output
                done[request.index] = Completion(prompt, output, reason, request.text)
                active.remove(request)
                free.append(request.slot)
            return len(kept)

        while waiting or active:
            admitted = []
            while waiting and free:
                index, (prompt, own, seed) = waiting.popleft()
                admitted.append(self._admit(index, free.pop(0), prompt, own, seed))
            if admitted:
                active += admitted
                if self.interleaver:
                    self.interleaver.pause()
                with progress.operation(f"prefill of {len(admitted)} requests"):
                    first = self._host.prefill(admitted, stats)
                for request, token in zip(admitted, first, strict=True):
                    deliver(request, [token])
            if active:
                with progress.operation(f"step {next(steps)} of {len(active)} requests"):
                    self._step(active, stats, deliver)
        if self.interleaver:
            self.interleaver.pause()
            for name, seconds in self.interleaver.clock.seconds.items():
                stats.add_seconds(name, seconds - clocked.get(name, 0.0))
        stats.total_seconds = time.perf_counter() - started
        return [done[i] for i in range(len(prompts))], stats

    def _step(self, active: list[Request], stats: Statistics, deliver: Deliver) -> None:
        stats.decode_calls += 1
        if self.interleaver is None:
            return self._host.run(active, self.scheduler, stats, deliver)
        if why_not(active, self.scheduler, self._verifier):
            self.interleaver.pause()
            self._on_device.clear()
            return self._host.run(active, self.scheduler, stats, deliver)
        self._on_device &= set(active)
        if entering := [r for r in active if r not in self._on_device]:
            self.interleaver.pause()
            if self._host.draft:
                self._host.run_draft(entering, self.scheduler)
                stats.draft_calls += 1
            self.interleaver.state.enter(entering, [self._host.limit(r) for r in entering])
            self._on_device |= set(entering)
        requests = list(active)
        emitted = self.interleaver.run(requests)
        stats.target_calls += 1
        stats.draft_calls += self._host.draft is not None
        stats.device_steps += 1
        # Each rank decided on its own device; a rank that went on with other tokens would leave the others waiting.
        if self._communicator.size > 1:
            compare_ranks(self._communicator, emitted)
        for request, tokens in zip(requests, emitted, strict=True):
            stats.record(self._host.limit(request), len(tokens) - 1, deliver(request, tokens))
        return None

    def trace(self, span: Span) -> None:
        """Enclose what steps enqueue in ``span(name)``: target, verify and draft; steps on the device have one span for
        the first two."""
        self._host.span = span
        if self.interleaver:
            self.interleaver.span = span

    def profile_costs(self, replays: int = 5) -> CostTable:
        """Seconds of idle draft and target steps up to the largest batch; rank 0's, the same on every rank.

        Raises:
            RequestError: the decoder has no draft, so there is nothing to schedule, or it is closed.
            MailboxError: a rank stayed silent while another waited for it on its GPU.
        """
        self._check_open()
        if self._host.draft is None:
            raise RequestError(
                "costs were asked of a decoder without a draft, which schedules nothing; open it with speculative=True"
            )
        batch, width = self._build.max_batch_size, self._drafted + 1
        target_rings, draft_rings = self._host.rings
        draft = IdleSteps(self._host.draft, draft_rings, rows_per_request=width)
        target = IdleSteps(self._host.target, target_rings)
        stream = torch.cuda.stream(self._execution.stream)
        with torch.inference_mode(), stream, self._execution.progress.operation("measurement of the costs"):
            table = CostTable.measure(draft, target, batch, batch * width, replays)
            self._check_fault()
        shared: CostTable = self._communicator.broadcast(table)
        return shared

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed, its ranks share nothing any more; open another one")

    def _check_fault(self) -> None:
        """Wait for the device, and raise if a kernel on it gave up waiting for another rank: its results are void."""
        if self._execution.fault is not None and int(self._execution.fault):
            self._execution.on_fault()

    def _seeds(self, params: Sequence[SamplingParams]) -> list[int]:
        """Each request's seed; those that have none get one of rank 0's, the same on every rank."""
        seeds = [p.seed if p.seed is not None else 0 if p.greedy else secrets.randbits(64) for p in params]
        drawn = any(p.seed is None and not p.greedy for p in params)
        return list(self._communicator.broadcast(seeds)) if drawn else seeds

    def _admit(self, index: int, slot: int, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
        eos = () if params.ignore_eos else self._target_config.eos_token_ids
        stops = frozenset(params.stop_token_ids) | frozenset(eos)
        return Request(index, slot, len(prompt), list(map(int, prompt)), params, stops, seed, self._detokenize)

    def _check_ranks(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """Raise on every rank if these differ: ranks with other rows would wait for each other in the first
        collective."""
        if self._communicator.size == 1:
            return
        given = repr(([list(prompt) for prompt in prompts], list(params))).encode()
        words = (
            f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, digest {hashlib.sha256(given).hexdigest()[:8]}"
        )
        everyone = self._communicator.all_gather_object(words)
        if len(set(everyone)) > 1:
            listed = "; ".join(f"rank {rank} {found}" for rank, found in enumerate(everyone))
            raise RequestError(
                f"ranks were given different prompts or sampling parameters: {listed}; give every rank the same"
            )

    def _check(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        problems = []
        if len(prompts) != len(params):
            problems.append(
                f"{len(prompts)} prompts, {len(params)} sampling parameters; pass one for all or one for each"
            )
        limit, vocab = self._build.max_seq_len, self._target_config.vocab_size
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=False)):
            needed = len(prompt) + own.max_tokens + self._drafted
            if not len(prompt):
                problems.append(f"prompt {i} is empty, expected at least one token")
            elif bad := [t for t in prompt if not is_integer(t) or not 0 <= t < vocab]:
                problems.append(f"prompt {i} has token ids {bad[:5]}, expected integers 0..{vocab - 1}")
            elif needed > limit:
                problems.append(
                    f"prompt {i} needs {needed} positions ({len(prompt)} prompt tokens, max_tokens {own.max_tokens}, "
                    f"{self._drafted} drafts), the engines were built for --max-seq-len {limit}"
                )
            if self._drafted and (own.num_draft_tokens or 0) > self._drafted:
                problems.append(
                    f"prompt {i} has num_draft_tokens {own.num_draft_tokens}, the draft's block has {self._drafted}; "
                    f"ask for 0..{self._drafted}, or leave it out"
                )
            if own.stop and self._detokenize is None:
                problems.append(f"prompt {i} has stop strings, which need the tokenizer; use stop_token_ids")
        if problems:
            raise RequestError("; ".join(problems))
