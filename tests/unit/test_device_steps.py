"""Steps that run on the device alone: the same tokens as steps that the host decides, for any batch.

Without a GPU the same steps run on the CPU, enqueued instead of captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from dspark_trt.runtime_py.acceptance import HeadAcceptance
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.decoder import Decoder, Execution
from dspark_trt.runtime_py.device_step import DeviceStep
from dspark_trt.runtime_py.host_step import HostStep
from dspark_trt.runtime_py.interleaving import Interleaver, low_batch_problem, request_counts, why_not
from dspark_trt.runtime_py.keyed_noise import gumbel_sample
from dspark_trt.runtime_py.requests import Request, RequestError, SamplingParams, Statistics
from dspark_trt.runtime_py.scheduling import FullLength, Threshold
from dspark_trt.runtime_py.slots import SlotState
from dspark_trt.runtime_py.verification import BlockVerification, StandardRejection, Verifier

from tests.fakes import TableDraft, Tables, TableTarget, request, table_decoder
from tests.thread_ranks import outcomes

TABLES = Tables.random(23, 4, seed=5)
ON_DEVICE = Execution(steps="device")


def completions(
    execution: Execution, params: Any, *, prompts: int, **options: Any
) -> tuple[list[list[int]], Statistics]:
    decoder = table_decoder(TABLES, execution=execution, **options)
    lengths = torch.randint(1, 9, (prompts,), generator=torch.Generator().manual_seed(prompts)).tolist()
    texts = [[(3 * i + j) % TABLES.vocab for j in range(n)] for i, n in enumerate(lengths)]
    done, stats = decoder.generate(texts, params)
    return [c.token_ids for c in done], stats


class CountedTarget(TableTarget):
    """Counts its calls; those of a prefill have the first position of a prompt."""

    def __init__(self) -> None:
        super().__init__(TABLES)
        self.prefills = self.steps = 0

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        first = bool(((inputs["positions"] == 0) & (inputs["slots"] >= 0)).any())
        self.prefills, self.steps = self.prefills + first, self.steps + (not first)
        super().run(inputs, outputs)


def both(params: Any, *, prompts: int, **options: Any) -> tuple[Statistics, Statistics]:
    """Decode both ways, want the same tokens, and return the statistics."""
    runs = []
    for steps in ("host", "device"):
        target = CountedTarget()
        runs.append(completions(Execution(steps=steps), params, prompts=prompts, target=target, **options))  # type: ignore[arg-type]
        assert runs[-1][1].decode_calls == target.steps
        assert runs[-1][1].target_calls == target.steps + target.prefills
    (wanted, host), (found, device) = runs
    assert found == wanted
    assert host.device_steps == 0
    assert (device.steps, device.accepted_per_position) == (host.steps, host.accepted_per_position)
    return host, device


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("prompts", [1, 8, 13])
def test_greedy_tokens_are_those_of_the_host(slots: int, prompts: int) -> None:
    """GR-1, in as far as it needs no graph: more prompts than slots, so requests come and go and change places."""
    _, device = both(SamplingParams(max_tokens=40), prompts=prompts, slots=slots)
    assert device.device_steps == device.decode_calls > 0
    assert 0 < device.accepted_per_position[0] < device.proposed_per_position[0]


@pytest.mark.parametrize("method", [StandardRejection(), BlockVerification()])
@pytest.mark.parametrize("sampling", [True, False])
def test_sampled_tokens_are_those_of_the_host(method: Any, sampling: bool) -> None:
    """Same keys, same draws: with drafts that are sampled or greedy, in batches that are mixed."""
    params = [SamplingParams(max_tokens=30, temperature=t, seed=9 + i) for i, t in enumerate([0.7, 0.0, 1.3] * 4)]
    _, device = both(params, prompts=12, slots=5, sampling=sampling, verifier=Verifier(method))
    assert device.device_steps > 0


@pytest.mark.parametrize("sampling", [True, False])
def test_a_target_alone_decodes_on_the_device(sampling: bool) -> None:
    """What speculation is compared with is replayed from graphs as well; big seeds keep all their bits."""
    temperatures = [0.7, 0.0, 1.3] if sampling else [0.0]
    seeds = [9, 0x123456789ABCDEF1, 0xFEDCBA9876543]
    params = [SamplingParams(max_tokens=30, temperature=t, seed=s) for t in temperatures for s in seeds]
    _, device = both(params, prompts=len(params), slots=2, speculative=False)
    assert device.device_steps > 0 and device.draft_calls == 0 and device.tokens_per_step == 1


def test_requests_of_other_lengths_share_a_batch() -> None:
    params = [SamplingParams(max_tokens=25, num_draft_tokens=n) for n in (0, 1, 2, 3, 4, None)]
    _, device = both(params, prompts=6, slots=6)
    proposed = device.proposed_per_position
    assert proposed[0] > proposed[3] > 0


def test_a_stop_within_accepted_drafts_cuts_the_rest_off() -> None:
    both(SamplingParams(max_tokens=60, stop_token_ids=(4, 11)), prompts=9, slots=3)


def test_batches_change_between_device_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a penalty takes its whole batch to the host; when it is done the others go on alone."""
    decided, run = [], HostStep.run

    def noted(self: HostStep, active: Sequence[Request], *arguments: Any) -> None:
        decided.append(any(request.params.penalizes for request in active))
        run(self, active, *arguments)

    params = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=12, repetition_penalty=1.4)] * 2
    both(params, prompts=4, slots=4)
    monkeypatch.setattr(HostStep, "run", noted)
    _, device = completions(ON_DEVICE, params, prompts=4, slots=4)
    assert decided and all(decided)
    assert device.device_steps == device.decode_calls - len(decided) > 0


def test_the_ranks_decisions_are_compared() -> None:
    """SMP-9, whether asked for or not: nobody can impose rank 0's decision on a device that has gone on."""

    class Other:
        rank, size = 0, 2

        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, value if isinstance(value, str) else [[1, 2, 3]]]

        def broadcast(self, value: Any) -> Any:
            return value

    decoder = table_decoder(TABLES, execution=ON_DEVICE, communicator=Other(), check_lockstep=False)
    with pytest.raises(RuntimeError, match="ranks decided differently"):
        decoder.generate([[1, 2]], SamplingParams(max_tokens=20))


def make_step(requests: int, slots: int = 3, fault: torch.Tensor | None = None) -> tuple[DeviceStep, SlotState]:
    state = SlotState(slots, TABLES.block, None, torch.device("cpu"))
    draft = TableDraft(TABLES, sampling=False)
    return DeviceStep(TableTarget(TABLES), draft, ({}, {}), state, requests, None, fault=fault), state


def run(step: DeviceStep) -> None:
    step.target()
    step.verify()
    step.draft()


def test_padding_changes_nothing() -> None:
    """A batch of one in a step of three emits what it emits alone, and leaves the other slots as they were."""
    results = []
    for size in (1, 3):
        step, state = make_step(size)
        state.enter([dataclasses.replace(request([5, 7], [1, 2, 3, 4], SamplingParams()), slot=1)], [4])
        step.place([1])
        run(step)
        results.append(
            (step.emitted(1), state.anchors[:3].tolist(), state.positions[:3].tolist(), state.drafts[:3].tolist())
        )
        assert state.anchors[0] == state.anchors[2] == 0
    assert results[0] == results[1]


def test_a_smaller_batch_leaves_nothing_of_a_larger_one() -> None:
    """KV-6: three requests, then one in the same tensors, which still hold the old mapping: no row of the step, of
    its context and of its block names another slot, and what the state has of the other requests stays."""
    step, state = make_step(3)
    entering = [request([5, 7 + i], [1, 2, 3, 4], SamplingParams()) for i in range(3)]
    state.enter([dataclasses.replace(r, slot=i) for i, r in enumerate(entering)], [4] * 3)
    step.place([0, 1, 2])
    run(step)
    assert step._seen["slots"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert step._block["slots"].tolist() == [0, 1, 2]
    kept = [t[[0, 2]].clone() for t in (state.anchors, state.positions, state.drafts)]
    position = int(state.positions[1])
    step.place([1])
    run(step)
    assert step._seen["slots"].tolist() == [1] * 5 + [-1] * 10
    assert step._block["slots"].tolist() == [1, -1, -1]
    rows = len(step.emitted(1)[0])
    assert step._context["feature_slots"].tolist() == [1] * rows + [-1] * (15 - rows)
    assert int(state.positions[1]) == position + rows
    found = [t[[0, 2]] for t in (state.anchors, state.positions, state.drafts)]
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))


def test_a_step_goes_by_what_the_device_holds() -> None:
    """GR-5: positions, anchors and slots that change on the device alone, without a word to the host, count in the next
    step: there is no copy of them that could go stale."""
    step, state = make_step(1)
    state.enter([request([5, 7], [1, 2, 3, 4], SamplingParams())], [4])
    step.place([0])
    run(step)
    for anchor, position, slot in ((3, 11, 0), (9, 12, 2)):
        state.anchors[slot], state.positions[slot], state.limits[slot] = anchor, position, 0
        step.slots.fill_(slot)
        run(step)
        choice = TABLES.target_logits(torch.tensor([anchor]), torch.tensor([position])).argmax()
        assert step.emitted(1) == [[int(choice)]]
        assert step._seen["slots"].tolist()[0] == slot and step._context["feature_positions"].tolist()[0] == position


def test_rejected_and_padding_rows_are_marked() -> None:
    """GR-6 and the contract of the draft: only the old anchor and the kept drafts become context."""
    step, state = make_step(2)
    text = request([5, 7], [0] * 4, SamplingParams())
    # Drafts of which exactly two are the target's own choices.
    ids, position = 7, 1
    for i in range(4):
        choice = int(TABLES.target_logits(torch.tensor([ids]), torch.tensor([position + i])).argmax())
        text.drafts[i] = choice if i < 2 else (choice + 1) % TABLES.vocab
        ids = text.drafts[i]
    state.enter([dataclasses.replace(text, slot=2)], [4])
    step.place([2])
    step.target()
    step.verify()
    assert len(step.emitted(1)[0]) == 3
    assert step._context["feature_slots"].tolist() == [2, 2, 2, -1, -1] + [-1] * 5
    assert step._context["feature_positions"].tolist()[:3] == [1, 2, 3]
    assert (state.positions[2], state.anchors[2]) == (4, step.emitted(1)[0][-1])


def test_the_fault_travels_with_the_tokens() -> None:
    fault = torch.zeros(1, dtype=torch.int32)
    step, state = make_step(1, fault=fault)
    state.enter([request([5, 7], [1, 2, 3, 4], SamplingParams())], [4])
    step.place([0])
    run(step)
    assert step.fault() == 0
    fault.fill_(2)
    run(step)
    assert step.fault() == 2


@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize(
    ("steps", "params"),
    [
        ("device", SamplingParams(max_tokens=40)),
        ("host", SamplingParams(max_tokens=40)),
        ("device", SamplingParams(max_tokens=40, repetition_penalty=1.2)),
    ],
    ids=["device", "host", "steps of the host between a device's"],
)
def test_a_fault_ends_the_run(steps: Any, params: SamplingParams, calls: int) -> None:
    """TP-11: what a kernel noted, in the prefill, a draft or a later call of the target, reaches the caller before any
    token that it made void does."""
    fault = torch.zeros(1, dtype=torch.int32)
    emitted: list[list[int]] = []
    before: list[int] = []

    class Target(TableTarget):
        def run(self, *arguments: Any) -> None:
            super().run(*arguments)
            count("target")

    class Draft(TableDraft):
        def run(self, *arguments: Any) -> None:
            super().run(*arguments)
            count("draft")

    ran: list[str] = []

    def count(name: str) -> None:
        ran.append(name)
        if len(ran) == calls + 1:
            fault.fill_(2)
            before.append(len(emitted))

    def failing() -> None:
        raise RuntimeError("rank 1 sent nothing")

    execution = Execution(steps=steps, fault=fault, on_fault=failing)
    sessions = {"target": Target(TABLES), "draft": Draft(TABLES, sampling=True)}
    decoder = table_decoder(TABLES, execution=execution, **sessions)
    with pytest.raises(RuntimeError, match="rank 1 sent nothing"):
        decoder.generate([[1]], params, lambda _, tokens: emitted.append(tokens))
    # A device's draft is behind its step's tokens, which the host reads meanwhile: they were good.
    late = 1 if steps == "device" and params.repetition_penalty == 1 and ran[calls] == "draft" and calls > 1 else 0
    assert before[0] <= len(emitted) <= before[0] + late


def test_costs_of_a_step_that_a_rank_missed_are_not_returned() -> None:
    fault = torch.zeros(1, dtype=torch.int32)

    def failing() -> None:
        raise RuntimeError("rank 1 sent nothing")

    decoder = table_decoder(TABLES, execution=Execution(fault=fault, on_fault=failing), slots=2)
    assert decoder.profile_costs(1).draft_seconds
    fault.fill_(2)
    with pytest.raises(RuntimeError, match="rank 1 sent nothing"):
        decoder.profile_costs(1)


def test_a_closed_decoder_is_refused() -> None:
    """What its ranks shared is gone: steps would write to memory that has another owner. Closing twice is one."""
    closed: list[int] = []
    with table_decoder(TABLES, execution=Execution(steps="device", close=lambda: closed.append(1))) as decoder:
        decoder.generate([[1]], SamplingParams(max_tokens=2))
        decoder.close()
    assert closed == [1]
    for call in (
        lambda: decoder.generate([[1]], SamplingParams(max_tokens=2)),
        decoder.capture,
        decoder.profile_costs,
    ):
        with pytest.raises(RequestError, match=r"the decoder is closed, .*; open another one"):
            call()


def test_what_needs_the_host_is_said() -> None:
    greedy = [request([1], [], SamplingParams())]
    assert why_not(greedy, FullLength(), Verifier()) is None
    assert "Threshold" in str(why_not(greedy, Threshold(HeadAcceptance(), 0.5), Verifier()))
    assert "sampler" in str(why_not(greedy, FullLength(), Verifier(sampler=lambda *a, **k: gumbel_sample(*a, **k))))
    for params, word in (
        (SamplingParams(presence_penalty=1), "penalties"),
        (SamplingParams(temperature=1, top_k=3), "top-k"),
    ):
        assert word in str(why_not([request([1], [], params)], FullLength(), Verifier()))


def test_the_plan_depends_on_the_request_count_alone() -> None:
    state = SlotState(8, TABLES.block, None, torch.device("cpu"))
    steps = Interleaver(
        TableTarget(TABLES), TableDraft(TABLES, sampling=False), ({}, {}), state, counts=(4, 1, 4), verifier=Verifier()
    )
    assert [steps.plan(n).requests for n in (1, 2, 4, 5, 8)] == [1, 4, 4, 5, 8]
    assert not any(steps.plan(n).captured for n in (1, 4, 5))


class Pool:
    """Replays calls as they are, and notes what was captured."""

    def __init__(self, log: list[str]):
        self.log = log

    def capture(self, call: Callable[[], None], name: str) -> Callable[[], None]:
        self.log.append(f"capture of {name}")
        return call


def on_a_stream(decoder: Decoder, log: list[str]) -> Interleaver:
    """The decoder's steps on the device as if there were a stream and graphs."""
    steps = decoder.interleaver
    assert steps
    steps._stream, steps._pool = object(), Pool(log)  # type: ignore[assignment]
    return steps


def test_steps_are_warmed_up_together_and_then_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """GR-3, KV-6: the largest count first, target, verification and draft twice after each other as they will be
    replayed, before anything is captured, and on padding alone, so that no request's rows are written."""
    log: list[str] = []
    for name in ("target", "verify", "draft"):
        part = getattr(DeviceStep, name)

        def noted(self: DeviceStep, name: str = name, part: Callable[[DeviceStep], None] = part) -> None:
            assert self.slots.tolist() == [-1] * self.requests
            log.append(f"{name} of {self.requests}")
            part(self)

        monkeypatch.setattr(DeviceStep, name, noted)
    steps = on_a_stream(table_decoder(TABLES, execution=Execution(steps="device", request_counts=(1, 3))), log)
    before = [t[:-1].clone() for t in vars(steps.state).values() if isinstance(t, torch.Tensor)]
    steps.capture(sampled=False)
    once = ["target of {0}", "verify of {0}", "draft of {0}"] * 2
    captured = ["capture of target and verification of {0} greedy requests", "capture of draft of {0} greedy requests"]
    assert log == [line.format(count) for count in (3, 1) for line in once + captured]
    after = [t[:-1] for t in vars(steps.state).values() if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_what_was_emitted_is_read_behind_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP-13: the copy to the host arrives when the host waits for an event that was recorded after it, not before.
    Tokens of the step before, or an event too early, would change the text."""
    in_flight: list[Callable[[], object]] = []

    class Event:
        def record(self) -> None:
            self.behind = len(in_flight)

        def synchronize(self) -> None:
            for copy in in_flight[: self.behind]:
                copy()
            del in_flight[: self.behind]

    verify = DeviceStep.verify

    def late(self: DeviceStep) -> None:
        before = self._host_report.clone()
        verify(self)
        arriving = self._host_report.clone()
        self._host_report.copy_(before)
        in_flight.append(lambda: self._host_report.copy_(arriving))

    params, texts = SamplingParams(max_tokens=40), [[1, 2], [3], [4, 5, 6]]
    wanted, _ = table_decoder(TABLES, execution=Execution(steps="host")).generate(texts, params)
    monkeypatch.setattr(DeviceStep, "verify", late)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    decoder = table_decoder(TABLES, execution=ON_DEVICE)
    on_a_stream(decoder, [])
    done, stats = decoder.generate(texts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in wanted]
    assert stats.device_steps > 0


def test_ranks_with_other_rows_are_refused_together() -> None:
    """TP-5: five prompts here and three there, or other parameters, would be steps of other rows; every rank
    says so in the same words, before anything runs, and nobody is left waiting."""
    ran: list[int] = []

    class Target(TableTarget):
        def run(self, *arguments: Any) -> None:
            ran.append(1)
            super().run(*arguments)

    def generate(communicator: Communicator, prompts: int, params: SamplingParams) -> list[list[int]]:
        target = Target(TABLES)
        decoder = table_decoder(TABLES, target=target, execution=ON_DEVICE, communicator=communicator)
        return [c.token_ids for c in decoder.generate([[1, 2]] * prompts, params)[0]]

    plain, longer = SamplingParams(max_tokens=9), SamplingParams(max_tokens=10)
    for given in ([(5, plain), (3, plain)], [(3, plain), (3, longer)]):
        first, second = outcomes(2, lambda c, given=given: generate(c, *given[c.rank]), timeout_s=20)  # type: ignore[misc]
        assert isinstance(first, RequestError) and isinstance(second, RequestError) and str(first) == str(second)
        assert f"rank 0 {given[0][0]} prompts of {2 * given[0][0]} tokens" in str(first)
        assert f"rank 1 {given[1][0]} prompts" in str(first) and "give every rank the same" in str(first)
    assert not ran
    same = outcomes(2, lambda c: generate(c, 5, plain), timeout_s=20)
    assert same[0] == same[1] and len(same[0]) == 5 and ran  # type: ignore[arg-type]


def test_default_counts_reach_the_largest_batch() -> None:
    assert request_counts(1) == (1,)
    assert request_counts(8) == (1, 2, 4, 8)
    assert request_counts(12) == (1, 2, 4, 8, 12)


def test_times_are_told_by_phase() -> None:
    _, stats = completions(ON_DEVICE, SamplingParams(max_tokens=40), prompts=3)
    assert min(stats.target_seconds, stats.verify_seconds, stats.draft_seconds, stats.gap_seconds) > 0
    parts = (
        stats.target_seconds + stats.verify_seconds + stats.draft_seconds + stats.gap_seconds + stats.prefill_seconds
    )
    assert parts <= stats.total_seconds


def test_request_counts_without_a_fused_boundary_are_told() -> None:
    """With the count to add."""
    assert low_batch_problem((4, 64), 6) is None
    assert low_batch_problem((), 6) is None
    said = str(low_batch_problem((64, 43), 6))
    assert "of 43 requests, has 258 rows, they take 256" in said
    assert said.endswith("add 42 to --request-counts")
