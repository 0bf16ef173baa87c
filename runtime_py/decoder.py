"""The decode loop: target step, verification, draft step, for all requests together.

A request enters by prefill: its prompt goes through the target in chunks of at most one window, the
last row's choice becomes its anchor, and the captured features of the last window wait for the draft.
From then on each step runs the target over [anchor, d1 .. dn] of every request, keeps the prefix of drafts
that verification accepts plus a token of the target's own (the new anchor), and runs the draft: the
features of the accepted rows enter its rings, rejected rows are left out, and a new block is drafted
behind the new anchor. Rejected rows need no rollback: the target's ring is longer than
its window by more than a step, and the draft's ring only ever receives accepted rows.

Every rank runs this loop on the same numbers and with the same keyed noise, and takes the same decisions.
Where ranks are not quite alike, rank 0's decisions count: what was drafted, how much of it is verified and
what is emitted is what it says, so that no rank leaves the others waiting in a collective.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..builder.config import DraftConfig, TargetConfig
from ..builder.engine import BuildConfig, Kind
from ..builder.engine_dir import WEIGHTS, EngineDir
from ..builder.network import load_network
from .communicator import Communicator, connect
from .costs import CostTable, IdleSteps
from .keyed_noise import seed_words, step_seeds
from .mapping import Mapping
from .requests import Completion, Request, RequestError, SamplingParams, Statistics
from .scheduling import FullLength, Scheduler
from .session import Session, TorchSession, make_caches, make_outputs
from .verification import Verifier

Detokenize = Callable[[Sequence[int]], str]
OnTokens = Callable[[int, list[int]], None]
"""Called with a prompt's index and its new tokens, in order, as they are accepted."""


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
    ):
        self._target, self._draft = target, draft
        self.scheduler: Scheduler = scheduler or FullLength()
        self._verifier, self._detokenize = verifier or Verifier(), detokenize
        self._target_config, self._draft_config = target_config, draft_config
        self._build, self._communicator, self._check_lockstep = build, communicator, check_lockstep
        self._drafted = draft_config.block_size if draft else 0
        self._target_rings = make_caches(target)
        self._draft_rings = make_caches(draft) if draft else {}
        # Pre-temperature logits of the last drafts, by slot, so that a request keeps its rows wherever it stands
        # in a batch; only sampled requests write theirs. A draft without that output drafts greedily.
        logits = [o for o in draft.io.outputs if o.name == "draft_logits"] if draft else []
        shape = (build.max_batch_size, self._drafted, target_config.vocab_size)
        self._draft_logits = torch.empty(shape) if logits else None

    @classmethod
    def from_dir(
        cls,
        engine_dir: Path | str,
        *,
        communicator: Communicator | None = None,
        speculative: bool = True,
        verifier: Verifier | None = None,
        check_lockstep: bool = False,
    ) -> Decoder:
        """A decoder over an engine directory, executed by the torch sessions of its weights.

        Raises:
            LaunchError: the job's ranks are not those the engines were built for.
            EngineDirError: the directory is incomplete or of another version.
        """
        directory = EngineDir.open(Path(engine_dir))
        communicator = communicator or connect(directory.tp_size)
        mapping = Mapping(communicator.size, communicator.rank, directory.tp_size)
        if directory.target is None:
            raise RequestError(f"{engine_dir}: holds a draft without its target; decoding needs both")

        def session(kind: Kind) -> TorchSession:
            network = load_network(kind, directory.path / WEIGHTS, mapping.tp_rank, directory.build)
            return TorchSession(network, communicator)

        return cls(
            session("target"),
            session("draft") if speculative else None,
            target_config=directory.target,
            draft_config=directory.draft,
            build=directory.build,
            communicator=communicator,
            verifier=verifier,
            detokenize=_detokenizer(directory.path),
            check_lockstep=check_lockstep,
        )

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_tokens: OnTokens | None = None,
    ) -> tuple[list[Completion], Statistics]:
        """Complete ``prompts`` (token ids); up to ``max_batch_size`` are in flight at once.

        Raises:
            RequestError: naming every prompt that is empty, has ids outside the vocabulary, does not fit
                ``max_seq_len`` together with its ``max_tokens``, or has stop strings without a tokenizer.
                Nothing runs then.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self._check(prompts, each)
        started = time.perf_counter()
        stats = Statistics(proposed_per_position=[0] * self._drafted, accepted_per_position=[0] * self._drafted)
        waiting = deque(enumerate(zip(prompts, each, self._seeds(each), strict=True)))
        free = list(range(self._build.max_batch_size))
        active: list[Request] = []
        done: dict[int, Completion] = {}
        emit = on_tokens or (lambda index, tokens: None)

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
                for request, token in zip(admitted, self._prefill(admitted, stats), strict=True):
                    deliver(request, [token])
            if active:
                self._step(active, stats, deliver)
        stats.total_seconds = time.perf_counter() - started
        return [done[i] for i in range(len(prompts))], stats

    # ------------------------------------------------------------------------------------- steps

    def _prefill(self, requests: Sequence[Request], stats: Statistics) -> list[int]:
        """Run the prompts through the target; return the first token of each."""
        started = time.perf_counter()
        window = self._target_config.sliding_window
        cursor = dict.fromkeys((r.slot for r in requests), 0)
        first: dict[int, int] = {}
        while pending := [r for r in requests if cursor[r.slot] < r.prompt_length]:
            budget, chunks = self._build.max_input_len, []
            for request in pending:
                size = min(window, request.prompt_length - cursor[request.slot], budget)
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
                # The first token: a step without drafts behind the prompt's last token.
                last = [request for request, _ in ready]
                verdict = self._communicator.broadcast(self._verifier(last, logits[[row for _, row in ready]], None))
                first |= {r.slot: token for r, token in zip(last, verdict.bonus, strict=True)}
            stats.target_calls += 1
        stats.prefill_seconds += time.perf_counter() - started
        return [first[r.slot] for r in requests]

    def _step(self, active: list[Request], stats: Statistics, deliver: Callable[[Request, Sequence[int]], int]) -> None:
        """Draft, verify and deliver once for every active request."""
        requests = list(active)
        if self._draft:
            started = time.perf_counter()
            self._run_draft(requests)
            stats.draft_calls += 1
            stats.draft_seconds += time.perf_counter() - started
        started = time.perf_counter()
        rows = [(t, r.anchor_position + j, r.slot) for r in requests for j, t in enumerate([r.tokens[-1], *r.drafts])]
        logits, features = self._run_target(*([row[i] for row in rows] for i in range(3)))
        cached = None if self._draft_logits is None else self._draft_logits[[r.slot for r in requests]]
        verdict = self._verifier(requests, logits, cached)
        stats.target_calls += 1
        stats.target_seconds += time.perf_counter() - started
        if self._check_lockstep:
            self._compare_ranks(verdict.accepted + verdict.bonus)
        verdict = self._communicator.broadcast(verdict)
        lengths = [len(r.drafts) for r in requests]
        if self._draft:
            self.scheduler.record(lengths, verdict.accepted)
        offset = 0
        for request, length, accepted, bonus in zip(requests, lengths, verdict.accepted, verdict.bonus, strict=True):
            self._add_context(request, request.anchor_position, features[offset : offset + accepted + 1])
            offset += length + 1
            stats.record(length, accepted, deliver(request, [*request.drafts[:accepted], bonus]))

    def _run_target(self, ids: list[int], positions: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
        inputs = {"input_ids": _ids(ids), "positions": _ids(positions), "slots": _ids(slots), **self._target_rings}
        outputs = make_outputs(self._target, inputs, self._target_rings)
        self._target.run(inputs, outputs)
        return outputs["logits"], outputs["target_features"]

    def _run_draft(self, requests: Sequence[Request]) -> None:
        """Insert what the requests' contexts hold into the rings and draft a block for each."""
        assert self._draft is not None
        rows = [(r.context_start + i, r.slot) for r in requests if r.context is not None for i in range(len(r.context))]
        positions = _ids([r.anchor_position for r in requests])
        inputs = {
            "anchor_ids": _ids([r.tokens[-1] for r in requests]),
            "positions": positions,
            "slots": _ids([r.slot for r in requests]),
            "target_features": torch.cat([r.context for r in requests if r.context is not None]),
            "feature_positions": _ids([position for position, _ in rows]),
            "feature_slots": _ids([slot for _, slot in rows]),
            **self._draft_rings,
        }
        if self._draft_logits is not None:
            inputs["temperature"] = torch.tensor([r.params.temperature for r in requests], dtype=torch.float32)
            inputs["seeds"] = step_seeds(seed_words([r.seed for r in requests]), positions)
        outputs = make_outputs(self._draft, inputs, self._draft_rings)
        self._draft.run(inputs, outputs)
        lengths = self.scheduler.lengths(outputs["confidence"], [self._draft_limit(r) for r in requests])
        chosen = [d[:n] for d, n in zip(outputs["draft_tokens"].tolist(), lengths, strict=True)]
        for i, (request, drafts) in enumerate(zip(requests, self._communicator.broadcast(chosen), strict=True)):
            request.drafts, request.context = drafts, None
            if self._draft_logits is not None and not request.params.greedy:
                self._draft_logits[request.slot] = outputs["draft_logits"][i]

    def _draft_limit(self, request: Request) -> int:
        own = request.params.num_draft_tokens
        return self._drafted if own is None else min(own, self._drafted)

    def profile_costs(self, replays: int = 5) -> CostTable:
        """Seconds of idle draft and target steps up to the largest batch; rank 0's, the same on every rank."""
        if self._draft is None:
            raise RequestError("costs were asked of a decoder without a draft; there is nothing to schedule")
        batch, width = self._build.max_batch_size, self._drafted + 1
        draft = IdleSteps(self._draft, self._draft_rings, rows_per_request=width)
        table = CostTable.measure(draft, IdleSteps(self._target, self._target_rings), batch, batch * width, replays)
        shared: CostTable = self._communicator.broadcast(table)
        return shared

    def _add_context(self, request: Request, start: int, features: Tensor) -> None:
        """Queue captured rows for the draft; only the last window can matter."""
        if request.context is None:
            request.context, request.context_start = features, start
        else:
            request.context = torch.cat((request.context, features))
        surplus = len(request.context) - self._draft_config.sliding_window
        if surplus > 0:
            request.context, request.context_start = request.context[surplus:], request.context_start + surplus

    # ------------------------------------------------------------------------------------ checks

    def _seeds(self, params: Sequence[SamplingParams]) -> list[int]:
        """Each request's seed; those that have none get one of rank 0's, the same on every rank."""
        seeds = [p.seed if p.seed is not None else 0 if p.greedy else secrets.randbits(64) for p in params]
        drawn = any(p.seed is None and not p.greedy for p in params)
        return list(self._communicator.broadcast(seeds)) if drawn else seeds

    def _admit(self, index: int, slot: int, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
        eos = () if params.ignore_eos else self._target_config.eos_token_ids
        stops = frozenset(params.stop_token_ids) | frozenset(eos)
        return Request(index, slot, len(prompt), list(prompt), params, stops, seed, self._detokenize)

    def _check(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        problems = []
        if len(prompts) != len(params):
            problems.append(f"{len(prompts)} prompts, {len(params)} sampling parameters")
        limit, vocab = self._build.max_seq_len, self._target_config.vocab_size
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=False)):
            needed = len(prompt) + own.max_tokens + self._drafted
            if not len(prompt):
                problems.append(f"prompt {i} is empty, expected at least one token")
            elif bad := [t for t in prompt if not 0 <= t < vocab]:
                problems.append(f"prompt {i} has token ids {bad[:5]}, expected 0..{vocab - 1}")
            elif needed > limit:
                problems.append(
                    f"prompt {i} needs {needed} positions ({len(prompt)} prompt tokens, max_tokens {own.max_tokens}, "
                    f"{self._drafted} drafts), the engines were built for --max-seq-len {limit}"
                )
            if own.stop and self._detokenize is None:
                problems.append(f"prompt {i} has stop strings, which need the tokenizer; use stop_token_ids")
        if problems:
            raise RequestError("; ".join(problems))

    def _compare_ranks(self, decision: list[int]) -> None:
        decisions = self._communicator.all_gather_object(decision)
        if any(d != decisions[0] for d in decisions):
            raise RuntimeError(
                f"ranks decided differently (accepted counts, then next tokens): {dict(enumerate(decisions))}; "
                "the ranks must run the same package, weights and libraries"
            )


def _detokenizer(directory: Path) -> Detokenize | None:
    """What turns output into text, if the directory has a tokenizer."""
    if not (file := directory / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids)))


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
