"""The sampling loop split by vocabulary on one GPU: every rank is a stream, its region ordinary memory of the same GPU.

Vocabularies are small, so that the blocks of all ranks fit on the GPU at once; full sizes need a GPU for each rank.
"""

from __future__ import annotations

import pytest
import torch
from dspark_trt.plugins import mhc_all_reduce as layout
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, capture
from tests.gpu.mailbox_cases import Regions
from tests.gpu.sampling_cases import MODES, Case, awkward, example

pytestmark = pytest.mark.gpu

HIDDEN = 256
TURNS = 20
activations = pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=str)
modes = pytest.mark.parametrize("mode", MODES)


class Ranks(Regions):
    """The ranks of split sampling."""

    def __init__(self, ranks: int, timeout_ms: int = 3000):
        super().__init__(ranks, HIDDEN, torch.bfloat16, timeout_ms)

    def cases(self, inputs: list[Tensor], mode: str, *, padded: bool = False) -> list[Case]:
        float64 = mode == "float64"
        return [Case(t, rank, inputs, float64=float64, padded=padded) for rank, t in enumerate(self.tables)]

    def run(self, *queue: list[Case]) -> None:
        """Enqueue all calls of all ranks, then wait for them."""
        torch.cuda.synchronize()
        for cases in queue:
            self.launch([case.split for case in cases])
        torch.cuda.synchronize()

    def assert_at_rest(self, calls: int) -> None:
        for rank in range(len(self.regions)):
            assert int(self.word(rank, "fault")) == 0
            assert int(self.word(rank, "sampling_generation")) == calls % 2
            assert not self.candidates(rank)[1 - calls % 2].any(), "a word for the next call was not cleared"
            assert bool((self.slots(rank) == torch.iinfo(self.integer).min).all()), "a slot of rows was touched"


def drawn(seed: int, requests: int, vocab: int, rank: int, mode: str, *, block: int = 5) -> list[Tensor]:
    return example(seed, torch.bfloat16, requests, vocab, rank, block=block, sampling=mode != "greedy")


SHAPES = [
    (1, 1, 16),  # one token to choose from: other ranks have none
    (2, 5, 16),  # on 4 ranks the third has one token and the last none
    (3, 264, 32),
    (5, 701, 24),
    (1, 1000, 256),
    (8, 961, 256),
    (9, 1000, 128),  # one request more than a matrix instruction takes
    (64, 997, 64),
]


@activations
@modes
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("requests", "vocab", "rank"), SHAPES)
def test_split_equals_whole(
    seed: int, activation: torch.dtype, ranks: int, requests: int, vocab: int, rank: int, mode: str
) -> None:
    """SMP-5, SMP-6, SMP-9: the bits of the whole loop on every rank, ties across borders and rows without a number
    among the requests; part of the cases with rows beyond the vocabulary."""
    inputs = example(seed, activation, requests, vocab, rank, sampling=mode != "greedy")
    if ranks == 1:
        inputs = awkward(inputs, 2)
        cases = [Case(torch.zeros(1, 2, dtype=torch.int32, device=inputs[0].device), 0, inputs, float64="64" in mode)]
        cases[0].split.run()
    else:
        job = Ranks(ranks)
        cases = job.cases(awkward(inputs, ranks), mode, padded=requests % 2 == 0)
        job.run(cases)
        # More than 8 requests in float32 take several launches.
        job.assert_at_rest(-(-requests // 8) if activation == torch.float32 else 1)
    for case in cases:
        case.check()


@modes
@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_in_a_row(seed: int, ranks: int, mode: str) -> None:
    """All calls are in flight at once, with request counts and blocks that jump: ranks drift apart as far as the
    protocol lets them, and no word of a call is met in a later one."""
    job = Ranks(ranks)
    sizes = [(64, 8), (1, 1), (3, 5), (64, 1), (2, 8), (9, 5), (1, 2), (8, 5), (40, 3), (1, 5)]
    queue = [
        job.cases(drawn(seed + i, requests, 700 - i, 64, mode, block=block), mode)
        for i, (requests, block) in enumerate(sizes)
    ]
    job.run(*queue * TURNS)
    job.assert_at_rest(TURNS * len(queue))
    for cases in queue:
        for case in cases:
            case.check()


@pytest.mark.parametrize("vocab", [1, 2, 3, 31, 32, 33, 999, 1000])
def test_the_lowest_id_wins_a_tie_across_ranks(vocab: int) -> None:
    """SMP-6: equal logits on all ranks, at borders, and at V - 1 alone."""
    job = Ranks(2)
    border = -(-vocab // 2)
    winners = [list(range(vocab)), [border - 1, border], [border, vocab - 1], [vocab - 1], [0, vocab - 1]]
    winners = [[min(token, vocab - 1) for token in tokens] for tokens in winners]
    inputs = drawn(0, len(winners), vocab, 32, "greedy")
    inputs[0].fill_(-1.0)
    inputs[3].zero_()
    for row, tokens in enumerate(winners):
        inputs[0][row][:, tokens] = 0.5
    cases = job.cases(inputs, "greedy")
    job.run(cases)
    wanted = torch.tensor([min(tokens) for tokens in winners], dtype=torch.int32).unsqueeze(1).expand(-1, 5)
    for case in cases:
        assert torch.equal(case.split.outputs[0].cpu(), wanted)


@modes
@pytest.mark.parametrize("requests", [1, 9])
def test_graphs_replay_what_eager_calls_compute(seed: int, requests: int, mode: str) -> None:
    """GR-1, GR-4, GR-6: two calls a graph, replayed with other inputs, an eager call between; a replay finds its
    generation by itself."""
    job = Ranks(2)
    first, second = (drawn(seed + i, requests, 900, 64, mode) for i in range(2))
    wanted = [job.cases([t.clone() for t in inputs], mode) for inputs in (first, second)]
    captured = job.cases(first, mode)
    graphs = [capture(case.split, case.split) for case in captured]
    assert [nodes for _, nodes in graphs] == [4, 4]
    for turn in range(20):
        source = wanted[turn % 2]
        for case, other in zip(captured, source, strict=True):
            for target, values in zip(case.split.inputs[:-1], other.split.inputs[:-1], strict=True):
                target.copy_(values)
            case.split.poison()
        torch.cuda.synchronize()
        for stream, (graph, _) in zip(job.streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for case, other in zip(captured, source, strict=True):
            case.expected = other.expected
            case.check()
        if turn % 3 == 0:
            job.run(source)
    job.assert_at_rest(2 * 20 + 7)


def test_a_silent_peer_costs_its_timeout_once(seed: int) -> None:
    """TP-11: the kernel gives up and says which rank it missed; later calls don't wait at all, and void results are
    tokens."""
    job = Ranks(2, timeout_ms=300)
    cases = job.cases(drawn(seed, 9, 500, 64, "sampled"), "sampled")
    job.run(cases)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cases[0].split.poison()
    start.record()
    for _ in range(5):
        cases[0].split.launch()
    end.record()
    torch.cuda.synchronize()
    assert int(job.word(0, "fault")) == layout.MAILBOX_SILENT_RANK + 1
    assert 300 <= start.elapsed_time(end) < 900
    tokens = cases[0].split.outputs[0]
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 500


def test_a_mailbox_of_other_ranks_is_noticed(seed: int) -> None:
    """TP-5: a rank that is given another's mailbox gives up at once and stores nothing with anybody."""
    job = Ranks(2)
    call = job.cases(drawn(seed, 2, 100, 32, "greedy"), "greedy")[0].split
    other = KernelCall(call.op, [*call.inputs[:-1], job.tables[1]], **vars(call.attributes))
    other.run()
    assert int(job.word(1, "fault")) == layout.MAILBOX_MISFIT and int(job.word(0, "fault")) == 0
    assert not any(job.candidates(rank).any() for rank in range(2))


@pytest.mark.parametrize(
    ("requests", "block", "size"),
    [(65, 5, {}), (1, 9, {}), (1, 5, {"L": 49}), (1, 5, {"L": 51}), (1, 5, {"P": 4}), (1, 5, {"V": 2**20 + 1})],
)
def test_unsupported_shapes_are_refused(requests: int, block: int, size: dict[str, int]) -> None:
    job = Ranks(2)
    inputs = drawn(0, min(requests, 64), 100, 32, "float64", block=min(block, 8))
    call = job.cases(inputs, "float64")[0].split
    call.sizes.update({"requests": requests, **size})
    call.attributes = type(call.attributes)(**{**vars(call.attributes), "block_size": block})
    with pytest.raises(RuntimeError, match="shape or attribute"):
        call.launch()


@pytest.mark.parametrize("name", ["base_logits", "head", "mailbox", "draft_tokens", "features"])
def test_bad_pointers_are_refused(name: str) -> None:
    call = Ranks(2).cases(drawn(0, 1, 100, 32, "greedy"), "greedy")[0].split
    call.pointers[name] = 0
    with pytest.raises(RuntimeError, match="null or not aligned"):
        call.launch()
