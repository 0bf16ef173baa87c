"""Sampling parameters, the distributions they give, and where a request stops (rows SMP-4, SMP-5, SMP-6)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.runtime_py.distributions import draft_probabilities, target_probabilities
from dspark_trt.runtime_py.requests import FinishReason, RequestError, SamplingParams
from dspark_trt.runtime_py.verification import (
    BlockVerification,
    Method,
    StandardRejection,
    Verifier,
    verify_greedy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import Tables, request, table_decoder

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0, "temperature": -0.7}, r"max_tokens is 0, expected at least 1; temperature is -0\.7"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": 1, "top_k": -2}, "top_k is -2"),
        ({"temperature": 1, "top_p": 0.0}, r"top_p is 0\.0, expected a probability above 0"),
        ({"temperature": 1, "top_p": 1.1}, "top_p is 1.1"),
        ({"temperature": 1, "min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, expected -2 to 2"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"seed": 2**64}, "seed is 18446744073709551616, expected 64 bits"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"stop": "end"}, "stop is 'end', expected a list of strings"),
        ({"stop": ["a", ""]}, "not empty"),
        ({"top_k": 5}, "temperature is 0, which is greedy: top_k, top_p and min_p change nothing"),
        ({"top_p": 0.9}, "which is greedy"),
        ({"min_p": 0.1}, "which is greedy"),
    ],
)
def test_parameters_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 3.5}, r"max_tokens is 3\.5, expected an integer"),
        (
            {"max_tokens": True, "seed": 1.5},
            r"max_tokens is True, expected an integer; seed is 1\.5, expected an integer",
        ),
        ({"temperature": 1, "top_k": 2.0}, r"top_k is 2\.0, expected an integer"),
        ({"num_draft_tokens": 1.5}, r"num_draft_tokens is 1\.5, expected an integer, or None"),
        ({"temperature": True}, "temperature is True, expected a number"),
        ({"top_p": "0.9"}, r"top_p is '0\.9', expected a number"),
        ({"presence_penalty": None}, "presence_penalty is None, expected a number"),
        ({"stop": [3]}, r"stop is \[3\], expected a list of strings that are not empty"),
        ({"stop_token_ids": [3.0]}, r"stop_token_ids is \[3\.0\], expected a list of integers"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3, expected a list of integers"),
        ({"stop_token_ids": [True]}, r"stop_token_ids is \[True\]"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected True or False"),
    ],
)
def test_parameters_of_other_types_are_refused(values: dict[str, Any], message: str) -> None:
    """Half a token would never be reached, and True is no count."""
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_integers_of_numpy_are_integers() -> None:
    """In parameters and prompts; what comes back holds ints."""
    numpy: dict[str, Any] = {"max_tokens": 7, "top_k": 3, "seed": 5, "num_draft_tokens": 2}
    params = SamplingParams(
        temperature=np.float32(0.5), stop_token_ids=np.array([6]), **{n: np.int64(v) for n, v in numpy.items()}
    )
    assert params == SamplingParams(temperature=0.5, stop_token_ids=(6,), **numpy)
    assert all(type(getattr(params, name)) is int for name in numpy)
    done, _ = table_decoder(Tables.random(7, 4)).generate([np.array([1, 2])], params)
    assert done == table_decoder(Tables.random(7, 4)).generate([[1, 2]], params)[0]
    assert all(type(token) is int for token in done[0].prompt_ids)


def test_an_output_beyond_its_limit_ends() -> None:
    state = request([0, 1, 2], [], SamplingParams(max_tokens=1))
    assert state.extend([3, 4]) == ([3], FinishReason.LENGTH)


def test_parameters_that_switch_off() -> None:
    """Both spellings of 'all tokens', and a seed that greedy decoding does not need."""
    assert not SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0).restricts
    assert not SamplingParams(top_k=0, seed=3).penalizes


def probabilities_of(
    logits: Sequence[float], *, tokens: Sequence[int] = (0,), drafts: Sequence[int] = (), **values: Any
) -> Any:
    params = SamplingParams(**{"temperature": 1.0, **values})
    rows = torch.tensor(logits).expand(1, len(drafts) + 1, -1)
    return target_probabilities([request(list(tokens), list(drafts), params)], rows)[0]


def logs(*values: float) -> list[float]:
    return [math.log(v) for v in values]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, [0.1, 0.4, 0.3, 0.2]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_p": 0.7}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_p": 0.71}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"min_p": 0.6}, [0, 4 / 7, 3 / 7, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # top_p is of what top_k leaves: 4/7 alone is not enough for 0.6, though 0.4 + 0.3 is more than that.
        ({"top_k": 2, "top_p": 0.57}, [0, 1, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
)
def test_distributions_by_hand(values: dict[str, Any], wanted: list[float]) -> None:
    """The float32 logits carry the only error."""
    probabilities = probabilities_of(logs(0.1, 0.4, 0.3, 0.2), **values)[0]
    assert probabilities.dtype == torch.float64
    assert torch.allclose(probabilities, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-7)


def test_penalties_by_hand() -> None:
    """Repetition sees prompt and output and acts on the sign; the others see the output, drafts in front included."""
    logits = [2.0, -1.0, 0.5, 1.0]
    # Prompt [0], output [1, 1], drafts [2]: rows after the anchor and after the draft.
    distributions = probabilities_of(logits, tokens=[0, 1, 1], drafts=[2], repetition_penalty=2.0)
    for probabilities, scores in zip(distributions, ([1.0, -2.0, 0.5, 1.0], [1.0, -2.0, 0.25, 1.0]), strict=True):
        assert torch.allclose(probabilities, torch.tensor(scores, dtype=torch.float64).softmax(0))
    distributions = probabilities_of(logits, tokens=[0, 1, 1], drafts=[2], presence_penalty=0.5, frequency_penalty=0.25)
    for probabilities, scores in zip(distributions, ([2.0, -2.0, 0.5, 1.0], [2.0, -2.0, -0.25, 1.0]), strict=True):
        assert torch.allclose(probabilities, torch.tensor(scores, dtype=torch.float64).softmax(0))


ODD_ROWS = {
    "all NaN": ([NAN] * 4, 0),
    "NaN first": ([NAN, 1.0, 1e4, 2.0], 2),
    "NaN last": ([1.0, 2000.0, 0.0, NAN], 1),
    "all -inf": ([-INF] * 4, 0),
    "all +inf": ([INF] * 4, 0),
    "+inf twice": ([0.0, 1.0, INF, INF], 2),
    "winner last": ([0.0, 0.0, 0.0, 1e5], 3),
}


@pytest.mark.parametrize("values", [{}, {"top_k": 2, "top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.0}])
@pytest.mark.parametrize("row", ODD_ROWS)
def test_rows_without_a_distribution(row: str, values: dict[str, Any]) -> None:
    """SMP-5: NaN counts as -inf; without a finite maximum the argmax has all mass, an id inside the vocabulary."""
    logits, winner = ODD_ROWS[row]
    wanted = torch.nn.functional.one_hot(torch.tensor(winner), 4).double()
    assert torch.equal(probabilities_of(logits, **values)[0], wanted)
    cached, token = torch.tensor(logits).view(1, 1, 4), torch.tensor([[3]])
    one = torch.ones(1)
    assert torch.equal(draft_probabilities(cached, one, token, one.bool())[0, 0], wanted)
    assert draft_probabilities(cached, one, token, ~one.bool())[0, 0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("vocab", [1, 2, 2047, 2048, 2049])
def test_ties_go_to_the_lowest_id(vocab: int) -> None:
    """SMP-6: greedy, top-k's last place and top-p's, and the token after the drafts."""
    constant = [1.0] * vocab
    greedy = probabilities_of(constant, temperature=0.0)[0]
    assert greedy[0] == 1 and greedy.sum() == 1
    for values in ({"top_k": 2}, {"top_p": min(1.0, 1.5 / vocab)}):
        kept = probabilities_of(constant, **values)[0].nonzero().flatten().tolist()
        assert kept == list(range(min(2, vocab)))
    after = Verifier()([request([0], [], SamplingParams(frequency_penalty=0.1))], torch.ones(1, vocab), None)
    assert after.bonus == [0]


def test_draft_distribution_is_of_the_numbers_sampled() -> None:
    """SMP-4: float32 division as in the draft; sums to one; near ties below a bf16 step stay apart."""
    logits = torch.tensor([[[20.0, 20.05, -INF]]])
    q = draft_probabilities(logits, torch.tensor([0.7]), torch.tensor([[0]]), torch.tensor([True]))[0, 0]
    exact = (logits / torch.tensor(0.7)).double().softmax(-1)[0, 0]
    assert torch.equal(q, exact) and abs(float(q.sum()) - 1) < 1e-12 and q[1] > 1.05 * q[0] and q[2] == 0


def test_uneven_numbers_of_drafts() -> None:
    """A request with fewer drafts than its neighbour keeps no more than it has, greedy and sampled."""
    logits = torch.zeros(6, 3)
    logits[torch.arange(6), torch.tensor([1, 2, 1, 2, 0, 1])] = 50.0
    for values in ({}, {"temperature": 1.0, "seed": 1}):
        params = SamplingParams(**values)
        rows = [request([0], [1, 2, 1], params), request([0], [], params), request([0], [1], params)]
        verdict = Verifier()(rows, torch.cat((logits[:4], logits[4:5], logits[5:6], logits[3:4])), None)
        assert verdict.accepted == [3, 0, 1]
        assert verdict.bonus == [2, 0, 2]
    assert verify_greedy(torch.tensor([[-1, -1]]), logits[:3].unsqueeze(0)).accepted == [0]


def letters(ids: Sequence[int]) -> str:
    return "".join("abcdefg"[i] for i in ids)


@pytest.mark.parametrize("cut", ["first token", "across a step", "last token"])
def test_stop_strings(cut: str) -> None:
    """A stop string inside accepted drafts ends the output there: its tokens are kept, its text is not."""
    tables = Tables.random(7, 4, seed=2)
    loop = table_decoder(tables, detokenize=letters)
    free, _ = loop.generate([[1]], SamplingParams(max_tokens=40))
    whole = letters(free[0].token_ids)
    assert free[0].text == whole
    at, length = {"first token": (0, 1), "across a step": (7, 6), "last token": (37, 3)}[cut]
    stop = whole[at : at + length]
    streamed: list[int] = []
    params = SamplingParams(max_tokens=40, stop=["nowhere", stop])
    done, _ = loop.generate([[1]], params, lambda _, tokens: streamed.extend(tokens))
    assert done[0].text == whole[: whole.index(stop)]
    assert letters(done[0].token_ids) == letters(streamed) == whole[: whole.index(stop) + length]
    assert done[0].finish_reason is FinishReason.STOP


def foreseen(vocab: int, block: int, *, period: int) -> Tables:
    """Distributions that depend on the position alone, and a draft that knows them: all drafts are accepted."""
    logits = 1.5 * torch.randn(period, vocab, generator=torch.Generator().manual_seed(3))
    base = torch.stack([logits.roll(-i, 0) for i in range(block)], 1)
    nothing = torch.zeros(vocab, 1)
    return Tables(logits.unsqueeze(1).expand(-1, vocab, -1), base, nothing, nothing, torch.zeros(block, vocab))


@pytest.mark.parametrize("method", [StandardRejection(), BlockVerification()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("end", ["end token", "stop token", "stop string"])
def test_ends_inside_accepted_drafts(end: str, temperature: float, method: Method) -> None:
    """The text without any end, cut at the first one; of drafts accepted after it nothing comes out."""
    tables, prompts = foreseen(7, 4, period=9), [[i % 7] * (1 + i) for i in range(24)]
    params = [SamplingParams(max_tokens=48, temperature=temperature, seed=i) for i in range(24)]
    options: dict[str, Any] = {"slots": 6, "detokenize": letters, "verifier": Verifier(method)}
    free, _ = table_decoder(tables, **options).generate(prompts, params)
    texts, size = [letters(c.token_ids) for c in free], 2 if end == "stop string" else 1
    mark = Counter(t[i : i + size] for t in texts for i in range(len(t) - size + 1)).most_common(1)[0][0]
    loop, token = table_decoder(tables, **options), "abcdefg".index(mark[0])
    if end == "end token":
        loop._target_config = dataclasses.replace(loop._target_config, eos_token_ids=(token,))
    given = {"end token": {}, "stop token": {"stop_token_ids": [token]}, "stop string": {"stop": [mark]}}[end]
    ending = [i for i, text in enumerate(texts) if mark in text]
    assert len(ending) > 20
    own = [dataclasses.replace(params[i], **given) for i in ending]
    done, stats = loop.generate([prompts[i] for i in ending], own)
    for i, one in zip(ending, done, strict=True):
        before = texts[i].partition(mark)[0]
        assert one.text == before and one.finish_reason is FinishReason.STOP
        assert letters(one.token_ids) == before + (mark if end == "stop string" else "")
    assert stats.accepted_per_position == stats.proposed_per_position
    # A stop token is dropped itself; whatever else is missing was accepted after an end.
    dropped = sum(stats.accepted_per_position) + stats.steps - stats.tokens
    assert dropped > (0 if end == "stop string" else len(ending))
    if end == "end token":
        ignoring = [dataclasses.replace(p, ignore_eos=True) for p in params]
        assert loop.generate(prompts, ignoring)[0] == free


def test_stop_strings_across_tokens() -> None:
    """Tokens of several letters: the text ends inside a token, the ids after it; across two steps; with bytes of
    which some are no text yet; of two strings that end together the earlier counts."""
    params = SamplingParams(max_tokens=9, stop=["bc", "\N{LATIN SMALL LETTER E WITH ACUTE}"])

    def run(steps: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str], own: SamplingParams) -> Any:
        state = request([0], [], own)
        state.detokenize = decode
        outcomes = [state.extend(step) for step in steps]
        return outcomes, state.text

    def pairs(ids: Sequence[int]) -> str:
        return "".join(("ab", "cd", "ba")[i] for i in ids)

    stop = FinishReason.STOP
    assert run([[0, 1, 0]], pairs, params) == ([([0, 1], stop)], "a")
    assert run([[2, 0], [1]], pairs, params) == ([([2, 0], None), ([1], stop)], "baa")
    assert run([[2], [1, 1]], pairs, params)[1] == "bacdcd"
    text = "a\N{LATIN SMALL LETTER E WITH ACUTE}b".encode()
    spelled = run([[*text[:2]], [*text[2:]]], lambda ids: bytes(ids).decode(errors="replace"), params)
    assert spelled == ([([*text[:2]], None), ([text[2]], stop)], "a")
    both = SamplingParams(stop=["c", "abc"])
    assert run([[0, 1]], pairs, both) == ([([0, 1], stop)], "")


def spell_bytes(ids: Sequence[int]) -> str:
    """Two bytes of "é" as tokens of their own, tokens of no text, of one and of several letters."""
    return b"".join((b"a", b"b", b"\xc3", b"\xa9", b"", b"abba ab")[i] for i in ids).decode(errors="replace")


def spell_words(ids: Sequence[int]) -> str:
    """A space before each word, which the beginning of a text drops, and a long run of spaces."""
    return "".join((" a", " b", "", "b", "a", " " * 20)[i] for i in ids).removeprefix(" ")


@pytest.mark.parametrize("detokenize", [spell_bytes, spell_words])
@settings(max_examples=600)
@given(data=st.data())
def test_stop_strings_are_found_where_the_whole_text_has_them(
    detokenize: Callable[[Sequence[int]], str], data: st.DataObject
) -> None:
    """Runs of tokens, and stop strings out of their text, so that some come late."""
    runs = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=12))
    outputs = [token for token, times in runs for _ in range(times)]
    text = detokenize(outputs) or "a"
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 40))
    stops = [text[start : start + size] for start, size in data.draw(st.lists(places, min_size=1, max_size=2))]
    state = request([0], [], SamplingParams(max_tokens=len(outputs), stop=stops))
    state.detokenize = detokenize
    ends = (n for n in range(1, len(outputs) + 1) if any(stop in detokenize(outputs[:n]) for stop in stops))
    first = next(ends, None)
    wanted = (outputs, FinishReason.LENGTH) if first is None else (outputs[:first], FinishReason.STOP)
    assert state.extend(outputs) == wanted


@pytest.mark.parametrize(
    ("detokenize", "outputs", "stop"),
    [
        pytest.param(spell_words, [3] * 50 + [2] * 60 + [5], "bbb  ", id="after tokens of no text"),
        pytest.param(
            lambda ids: bytes(ids).decode(errors="replace"),
            list("abcdefghijklmnop\N{GRINNING FACE}x".encode()),
            "\N{GRINNING FACE}x",
            id="a character of four tokens",
        ),
    ],
)
def test_stop_strings_reach_far_back(detokenize: Callable[[Sequence[int]], str], outputs: list[int], stop: str) -> None:
    state = request([0], [], SamplingParams(max_tokens=len(outputs), stop=[stop]))
    state.detokenize = detokenize
    assert state.extend(outputs) == (outputs, FinishReason.STOP)


def test_a_stop_string_costs_a_token_the_same_however_long_the_output_is() -> None:
    """Every token asks for the text of a few tokens, not of all."""
    decoded = Counter[str]()

    def decode(ids: Sequence[int]) -> str:
        decoded["tokens"] += len(ids)
        return "a" * len(ids)

    state = request([0], [], SamplingParams(max_tokens=5000, stop=["stop"]))
    state.detokenize = decode
    state.extend([1] * 1000)
    before = decoded["tokens"]
    state.extend([1] * 1000)
    assert decoded["tokens"] - before < 1000 * 40


def test_stop_strings_need_a_tokenizer() -> None:
    loop = table_decoder(Tables.random(7, 4))
    with pytest.raises(RequestError, match="prompt 1 has stop strings, which need the tokenizer"):
        loop.generate([[1], [2]], [SamplingParams(), SamplingParams(stop=["x"])])
    done, _ = loop.generate([[1]], SamplingParams(max_tokens=3))
    assert done[0].text is None


def test_whole_number_temperatures() -> None:
    """1 and 0 are temperatures as good as 1.0 and 0.0."""
    tables = Tables.random(7, 4, seed=2)
    for value in (0, 1, 2):
        done = [
            table_decoder(tables).generate([[1]], SamplingParams(temperature=t, seed=3, max_tokens=20))[0]
            for t in (value, float(value))
        ]
        assert done[0] == done[1]


def test_fewer_drafts_by_request() -> None:
    """num_draft_tokens limits what is verified, not what comes out."""
    tables = Tables.random(7, 4, seed=2)
    done = {}
    for limit in (0, 1, 3, 4, None):
        params = SamplingParams(max_tokens=60, num_draft_tokens=limit)
        (completion,), stats = table_decoder(tables).generate([[1]], params)
        done[limit] = completion.token_ids
        verified = 4 if limit is None else limit
        assert stats.proposed_per_position == [stats.steps] * verified + [0] * (4 - verified)
    assert all(tokens == done[0] for tokens in done.values())
