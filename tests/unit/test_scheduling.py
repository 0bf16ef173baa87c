"""How many drafts are verified, and that the choice does not bias what comes out (row SMP-11)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from dspark_trt.builder.network import NetworkIO, TensorInfo
from dspark_trt.runtime_py.acceptance import (
    Acceptance,
    HeadAcceptance,
    OnlineAcceptance,
    ScheduleError,
    calibration_error,
)
from dspark_trt.runtime_py.costs import CostError, CostTable, IdleSteps
from dspark_trt.runtime_py.requests import RequestError, SamplingParams
from dspark_trt.runtime_py.scheduling import (
    EarlyStop,
    FullLength,
    Lookahead,
    Scheduler,
    Threshold,
    best_capacity,
    descending,
    spend,
    survivals,
)
from dspark_trt.runtime_py.session import infer_shapes
from dspark_trt.runtime_py.verification import BlockVerification, Method, StandardRejection, Verifier
from torch import Tensor

from tests.enumeration import all_drafts, before, bias, draft_probability, emitted_joint, target_joint
from tests.fakes import Tables, table_decoder

EXACT = 1e-12
WARM = SamplingParams(temperature=1.0)
methods = pytest.mark.parametrize("method", [StandardRejection(), BlockVerification()], ids=lambda m: type(m).__name__)


def flat_costs(*by_rows: float) -> CostTable:
    """Verification of 1, 2, .. rows takes ``by_rows``; drafting nothing."""
    return CostTable({100: 0.0}, dict(enumerate(by_rows, 1)))


def linear_costs(rows: int, start: float, each: float) -> CostTable:
    return flat_costs(*(start + each * n for n in range(1, rows + 1)))


class Retrospective(EarlyStop):
    """Searches all lengths of the current block for the best, as if that were allowed."""

    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        survival = survivals(self._acceptance.probabilities(confidence), limits)
        return spend(survival, best_capacity(survival, self._costs))


def one_by_one(scheduler: Scheduler, block: int) -> Callable[[Tensor], list[int]]:
    return lambda confidence: [scheduler.lengths(row.unsqueeze(0), [block])[0] for row in confidence]


# Distribution -------------------------------------------------------------------------------------------


def papers_example() -> tuple[Tables, CostTable]:
    """p = (0.7, 0.3), q = (0.5, 0.5). One draft is not worth its row, two are, if the first was token 0."""
    rows = torch.tensor([0.7, 0.3]).log().expand(1, 2, 2)
    confidence = torch.tensor([[0.0, 0.0], [20.0, -20.0]])  # slot 0: a half; slot 1: sure after 0, hopeless after 1
    tables = Tables(rows, torch.zeros(1, 2, 2), torch.zeros(2, 1), torch.zeros(2, 1), confidence)
    return tables, flat_costs(1.0, 1.6, 1.7)


@methods
def test_the_papers_example(method: Method) -> None:
    """Choosing the best length in retrospect emits token 0 with 0.85 instead of 0.7; the early stop with 0.7."""
    tables, costs = papers_example()
    for scheduler, wanted in ((Retrospective, 0.15), (EarlyStop, 0.0)):
        lengths = one_by_one(scheduler(HeadAcceptance(), costs), 2)
        emitted, _ = emitted_joint(tables, WARM, method, lengths=lengths)
        # Logarithms of p in float32 are off by 2e-8 themselves.
        assert float(emitted[0].sum()) == pytest.approx(0.7 + wanted, abs=1e-7)
        found = bias(tables, WARM, method, lengths=lengths)
        assert found < EXACT if wanted == 0 else found == pytest.approx(wanted, abs=1e-7)


@methods
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("draft", ["sampled", "greedy"])
def test_schedules_leave_the_distribution_alone(draft: str, temperature: float, method: Method) -> None:
    """Every schedule, with costs that make it cut at different lengths for different drafts."""
    tables, params = Tables.random(3, 3, seed=4), SamplingParams(temperature=temperature)
    schedules: list[Scheduler] = [Threshold(HeadAcceptance(), m) for m in (0.2, 0.5, 0.8)]
    schedules += [EarlyStop(HeadAcceptance(), linear_costs(4, s, 1.0)) for s in (0.5, 2.0, 8.0)]
    schedules += [EarlyStop(HeadAcceptance((0.5, 1.0, 2.0)), flat_costs(1.0, 1.3, 1.3, 1.9))]
    seen = set()
    for schedule in schedules:
        lengths = one_by_one(schedule, 3)
        seen |= set(lengths(tables.confidences(before(all_drafts(tables)))))
        assert bias(tables, params, method, lengths=lengths, sampled=draft == "sampled") < EXACT
    assert seen == {0, 1, 2, 3}


@methods
def test_retrospective_choice_is_found_in_random_models(method: Method) -> None:
    """The same test sees the fault where it was not built in by hand."""
    costs = flat_costs(1.0, 1.7, 1.75, 2.4)
    found = [
        bias(Tables.random(3, 3, seed=s), WARM, method, lengths=one_by_one(Retrospective(HeadAcceptance(), costs), 3))
        for s in range(6)
    ]
    assert max(found) > 1e-3


@methods
@pytest.mark.parametrize("schedule", ["early stop", *(f"{n} drafts" for n in range(7))])
def test_two_requests_share_a_schedule(schedule: str, method: Method) -> None:
    """The length of one depends on the other's drafts: its distribution, averaged over those, is still the target's.
    A number of drafts from two steps before is a constant for the current ones."""
    first, second = (
        # Slot 0 is alike for all drafts; the later ones differ by the token before.
        dataclasses.replace(Tables.random(3, 3, seed=s), confidence=torch.tensor([[2.0, 2, 2], [c, -1, 1], [1, c, -2]]))
        for s, c in ((4, 1.2), (5, 1.3))
    )
    chance, _ = draft_probability(second, WARM, True, lambda logits: logits)
    drafts = all_drafts(first)
    own, other = (t.confidences(before(drafts)) for t in (first, second))
    early = EarlyStop(HeadAcceptance(), linear_costs(8, 2.0, 1.0))
    mixed = torch.zeros([3] * 4, dtype=torch.float64)
    seen = set()
    for i in range(len(drafts)):
        both = [torch.stack((row, other[i])) for row in own]
        if schedule == "early stop":
            lengths = [early.lengths(pair, [3, 3])[0] for pair in both]
        else:
            survival = [survivals(HeadAcceptance().probabilities(pair), [3, 3]) for pair in both]
            lengths = [spend(s, int(schedule[0]))[0] for s in survival]
        seen |= set(lengths)
        mixed += chance[i] * emitted_joint(first, WARM, method, lengths=constant(lengths))[0]
    assert float((mixed - target_joint(first, WARM)).abs().sum()) / 2 < EXACT
    # One or two drafts go to slots 0, which are likelier than what follows, whatever was drafted.
    assert len(seen) > 1 or schedule in ("0 drafts", "1 drafts", "2 drafts", "6 drafts")


def constant(lengths: list[int]) -> Callable[[Tensor], list[int]]:
    return lambda _: lengths


# Algorithm ----------------------------------------------------------------------------------------------


def logits(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).logit()


def test_survival_is_the_running_product() -> None:
    """SMP-11: 0.9, 0, 0.9 survives 0.9, 0, 0; after a limit nothing does; logits of +-100 are certain."""
    product = survivals(torch.tensor([[0.9, 0.0, 0.9], [0.5, 0.5, 0.5]]).double(), [3, 2])
    assert torch.allclose(product, torch.tensor([[0.9, 0, 0], [0.5, 0.25, 0]]).double())
    head = HeadAcceptance().probabilities(torch.tensor([[100.0, -100.0, math.nan, math.inf, -math.inf]]))[0]
    assert head[0] == 1 and head[1] < 1e-40 and head[2] == 0 and head[3] == 1 and head[4] == 0
    assert EarlyStop(HeadAcceptance(), linear_costs(8, 100.0, 0.1)).lengths(
        logits([0.9, 0, 0.9], [0, 0.9, 0.9]), [3, 3]
    ) == [1, 0]


def test_drafts_in_descending_survival() -> None:
    """The likeliest first; of equals the earlier slot, then the earlier request: slots of a request in order."""
    survival = torch.tensor([[0.9, 0.9, 0.1], [0.9, 0.5, 0.0]]).double()
    assert [(j, r) for _, j, r in descending(survival)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [spend(survival, n) for n in range(7)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 2]]


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        (flat_costs(1, 1, 1, 1), 3),
        (flat_costs(1, 2, 2, 2), 0),
        # tau is 1.5, 1.75, 1.875: equality stops.
        (flat_costs(1, 1.5, 1.5, 1.5), 0),
        (flat_costs(1, 1.4999, 1.74, 9.0), 2),
        (flat_costs(1, 1.2, 1.2, 1.6), 2),
        # A later bargain is not looked for.
        (flat_costs(1, 1.6, 1.0, 1.0), 0),
    ],
)
def test_early_stop_by_hand(costs: CostTable, wanted: int) -> None:
    halves = logits([0.5, 0.5, 0.5])
    assert EarlyStop(HeadAcceptance(), costs).lengths(halves, [3]) == [wanted]
    assert EarlyStop(HeadAcceptance(), costs).lengths(halves, [1]) == [min(wanted, 1)]


def test_lookahead_spends_what_it_foresaw() -> None:
    """The number is the best of two steps before, wherever it lies; the first two steps verify all."""
    sure, weak = logits([0.9, 0.9, 0.9]), logits([0.1, 0.1, 0.1])
    costs = flat_costs(1.0, 1.05, 1.5, 1.6, 9.0, 9.0, 9.0, 9.0)
    # tau of `sure` is 1, 1.9, 2.71, 3.439: the dent at three rows is stepped over. That of `weak` is 1 to 1.111.
    assert best_capacity(survivals(sure.sigmoid(), [3]), costs) == 3
    assert best_capacity(survivals(weak.sigmoid(), [3]), costs) == 1
    assert EarlyStop(HeadAcceptance(), costs).lengths(sure, [3]) == [1]
    schedule = Lookahead(HeadAcceptance(), costs)
    assert [schedule.lengths(c, [3]) for c in (weak, sure, weak, sure)] == [[3], [3], [1], [3]]
    schedule.lengths(weak, [3])
    two = torch.cat((weak, sure))
    assert schedule.lengths(two, [3, 3]) == [0, 3], "three drafts, of the likelier request"
    assert schedule.lengths(two, [3, 1]) == [0, 1], "one, and no more than its limit"


def test_static_threshold() -> None:
    """The prefix before the first unlikely draft, up to the request's limit."""
    confidence = logits([0.9, 0.4, 0.9], [0.5, 0.6, 0.9], [0.9, 0.9, 0.9], [0.1, 1, 1])
    assert Threshold(HeadAcceptance(), 0.5).lengths(confidence, [3, 3, 2, 3]) == [1, 3, 2, 0]
    assert FullLength().lengths(confidence, [3, 1, 2, 0]) == [3, 1, 2, 0]


# Acceptance ---------------------------------------------------------------------------------------------


def simulated_steps(true: Sequence[float], count: int = 40_000) -> tuple[Tensor, Tensor, Tensor]:
    """Steps whose position i is kept with the sigmoid of confidence / true[i]."""
    generator = torch.Generator().manual_seed(0)
    confidence = 3 * torch.randn(count, len(true), generator=generator, dtype=torch.float64) + 1
    passed = torch.rand(confidence.shape, generator=generator).double() < (confidence / torch.tensor(true)).sigmoid()
    lengths = torch.randint(0, len(true) + 1, (count,), generator=generator)
    accepted = torch.minimum(passed.long().cumprod(1).sum(1), lengths)
    return confidence, lengths, accepted


def test_sequential_temperatures_are_recovered() -> None:
    """Position by position, on the grid of 49; a reversed order of fitting would not see the products."""
    true = [2.0, 0.5, 1.0, 2.0]
    confidence, lengths, accepted = simulated_steps(true)
    fitted = HeadAcceptance.calibrated(confidence, lengths, accepted)
    # A grid step is a factor of 1.09; the error of calibration is flat near its minimum.
    # The last position is tried in few steps, and its temperature matters as little.
    assert fitted.temperatures[:3] == pytest.approx(true[:3], rel=0.2)
    survival, raw = (h.probabilities(confidence).cumprod(1)[:, -1] for h in (fitted, HeadAcceptance()))
    tried, outcome = lengths == 4, (accepted == 4).double()
    better, worse = (float(calibration_error(s[tried], outcome[tried])) for s in (survival, raw))
    assert better < 0.7 * worse


def test_nothing_to_calibrate_by() -> None:
    """A position that was never verified, or one that any temperature suits alike, stays as it is."""
    confidence = torch.tensor([[1.0, -2.0], [2.0, 0.5]])
    never = HeadAcceptance.calibrated(confidence, torch.tensor([1, 1]), torch.tensor([1, 0]))
    assert never.temperatures[1] == 1.0
    assert HeadAcceptance.calibrated(confidence[:0], torch.zeros(0), torch.zeros(0)).temperatures == [1.0, 1.0]
    # A confidence of zero is a half at every temperature.
    halves = HeadAcceptance.calibrated(torch.zeros(4, 1), torch.ones(4), torch.tensor([1, 0, 0, 0]))
    assert halves.temperatures == [1.0]


def test_impossible_schedules() -> None:
    for temperatures in ((0.0, 1.0), (1.0, -1.0), (math.nan,), (math.inf,)):
        with pytest.raises(ScheduleError, match=r"confidence temperatures \[.*\], expected numbers above 0"):
            HeadAcceptance(temperatures)
    with pytest.raises(ScheduleError, match="2 confidence temperatures for a block of 3 drafts"):
        HeadAcceptance((1.0, 1.0)).probabilities(torch.zeros(4, 3))
    for minimum in (-0.1, 1.1, math.nan):
        with pytest.raises(ScheduleError, match=r"confidence threshold of .*, expected a probability"):
            Threshold(HeadAcceptance(), minimum)


def test_calibration_error_by_hand() -> None:
    assert float(
        calibration_error(torch.tensor([0.2, 0.2]).double(), torch.tensor([0.0, 1.0]).double())
    ) == pytest.approx(0.3)
    assert float(calibration_error(torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 0.0]).double())) == 0
    # Opposite errors in different bins do not cancel.
    assert float(calibration_error(torch.tensor([0.9, 0.1]).double(), torch.tensor([1.0, 0.0]).double())) > 0.09


def test_online_acceptance() -> None:
    """By position, given that the one before was kept; what was not verified, or is after a rejection, says
    nothing; old steps count less, and a position that is left alone becomes worth a trial again."""
    assert OnlineAcceptance(3).probabilities(torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2
    online = OnlineAcceptance(3, prior=2.0, prior_rate=0.5, decay=1.0)
    online.record([3, 2, 0], [1, 2, 0])
    # Position 0: tried twice, kept twice; 1: twice, once; 2: never (not verified, or after a rejection).
    assert online.probabilities(torch.zeros(1, 3))[0].tolist() == pytest.approx([3 / 4, 2 / 4, 1 / 2])
    confidence, lengths, accepted = simulated_steps([1.0, 1.0], 2000)
    online, wanted = OnlineAcceptance(2, prior=4.0), float(confidence.sigmoid().mean())
    for length, kept in zip(lengths.tolist(), accepted.tolist(), strict=True):
        online.record([length], [kept])
    # A few hundred counted trials: two standard errors are 0.05.
    assert online.probabilities(torch.zeros(1, 2))[0, 0] == pytest.approx(wanted, abs=0.05)
    for outcome in (2, 0):
        for _ in range(4000):
            online.record([2], [outcome])
        assert float(online.probabilities(torch.zeros(1, 2))[0, 0]) == pytest.approx(outcome / 2, abs=0.03)
    for _ in range(8000):
        online.record([0], [0])
    assert online.probabilities(torch.zeros(1, 2)).min() > 0.9


# Costs and the loop -------------------------------------------------------------------------------------


def test_costs_of_sizes_between() -> None:
    """A step costs as much as the next larger that was measured; beyond the largest nothing is known."""
    table = CostTable({1: 1.0, 4: 2.0}, {2: 1.0, 8: 3.0})
    assert [table.steps_per_second(r, n) for r, n in ((1, 1), (1, 2), (2, 3), (4, 8))] == [1 / 2, 1 / 2, 1 / 5, 1 / 5]
    with pytest.raises(CostError, match="a step of 9 was not measured, the largest is 8"):
        table.steps_per_second(1, 9)


def test_measured_costs_cover_every_batch() -> None:
    """All sizes up to the full batch, and no cache is touched."""
    loop = table_decoder(Tables.random(5, 4), slots=7)
    table = loop.profile_costs(replays=2)
    assert max(table.draft_seconds) == 7 and max(table.verify_seconds) == 35
    assert list(table.verify_seconds)[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert all(0 < s < 1 for s in (*table.draft_seconds.values(), *table.verify_seconds.values()))
    assert table.steps_per_second(7, 35) > 0
    with pytest.raises(RequestError, match="without a draft"):
        table_decoder(Tables.random(5, 4), speculative=False).profile_costs()
    taken: list[int] = []
    CostTable.measure(taken.append, lambda _: None, 2, 1, replays=3)
    assert taken == [1] * 4 + [2] * 4


class CacheOf:
    """A session that has a ring, and notes where its tensors are."""

    io = NetworkIO(
        tuple(TensorInfo(n, torch.int32, s) for n, s in (("slots", ("T",)), ("positions", ("R",)), ("ring", (3, 4)))),
        (TensorInfo("logits", torch.float32, ("T", 2)), TensorInfo("ring_out", torch.int32, (3, 4))),
        {"ring_out": "ring"},
    )

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        return infer_shapes(self.io, inputs)

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.seen.append(dict(inputs))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_idle_steps_are_where_the_caches_are(device: str) -> None:
    """Rows and requests of the asked size, slots that enter nothing, and no copy between devices."""
    session, ring = CacheOf(), torch.zeros(3, 4, dtype=torch.int32, device=device)
    IdleSteps(session, {"ring": ring}, rows_per_request=5)(2)
    (seen,) = session.seen
    assert seen["ring"] is ring and {t.device.type for t in seen.values()} == {device}
    assert seen["slots"].shape == (10,) and seen["positions"].shape == (2,)
    if device == "cpu":
        assert seen["slots"].eq(-1).all() and seen["positions"].eq(0).all()


SCHEDULES = {
    "threshold": lambda a, c: Threshold(a, 0.5),
    "early stop": EarlyStop,
    "lookahead": Lookahead,
}


@methods
@pytest.mark.parametrize("acceptance", [HeadAcceptance, lambda: OnlineAcceptance(4, prior=8)], ids=["head", "online"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scheduled_loop_keeps_greedy_text(schedule: str, acceptance: Callable[[], Acceptance], method: Method) -> None:
    """Every schedule through the loop: the same text in fewer rows, limits of requests kept."""
    tables = Tables.random(7, 4, seed=2)
    params = [SamplingParams(max_tokens=60, num_draft_tokens=n) for n in (None, 1, 3, None)]
    plain, full = table_decoder(tables).generate([[i] for i in range(4)], params)
    scheduler = SCHEDULES[schedule](acceptance(), linear_costs(20, 4.0, 1.0))
    loop = table_decoder(tables, scheduler=scheduler, verifier=Verifier(method))
    done, stats = loop.generate([[i] for i in range(4)], params)
    assert done == plain
    assert 0 < sum(stats.proposed_per_position) < sum(full.proposed_per_position)


@methods
@pytest.mark.parametrize(
    ("schedule", "acceptance"),
    [("early stop", HeadAcceptance()), ("lookahead", HeadAcceptance()), ("early stop", OnlineAcceptance(4, prior=8))],
    ids=["early stop", "lookahead", "early stop, online"],
)
def test_scheduled_draws_have_the_distribution(schedule: str, acceptance: Acceptance, method: Method) -> None:
    """SMP-1: 32,768 draws, 512 requests that compete for rows, chi-square below its 1e-6 quantile."""
    probabilities = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    tables = Tables.random(3, 4, seed=1)
    tables = Tables(
        probabilities.log().float().expand(5, 3, 3).contiguous(),
        tables.base,
        tables.embed,
        tables.head,
        tables.confidence,
    )
    scheduler = SCHEDULES[schedule](acceptance, CostTable({512: 0.0}, {n: 1000.0 + n for n in range(1, 2561)}))
    loop = table_decoder(tables, slots=512, scheduler=scheduler, verifier=Verifier(method))
    params = [SamplingParams(temperature=1.0, max_tokens=64, seed=i) for i in range(512)]
    done, stats = loop.generate([[i % 3] for i in range(512)], params)
    drawn = torch.tensor([c.token_ids for c in done])
    pairs = torch.bincount((3 * drawn[:, 0::2] + drawn[:, 1::2]).flatten(), minlength=9)
    expected = (probabilities.unsqueeze(1) * probabilities).flatten() * pairs.sum()
    assert float(((pairs - expected) ** 2 / expected).sum()) < 42.7
    assert 0 < stats.proposed_per_position[3] < stats.proposed_per_position[0]
