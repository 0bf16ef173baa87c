"""The decode loop: what it emits, what it hands the draft, and what it refuses.

A scripted draft knows the text that plain target decoding gives and spoils its proposals at chosen
positions, so that every acceptance length occurs on purpose; it also checks each context row it is given
against the rows of a single pass over the whole text. In released numerics a row does not depend on the
rows beside it, so all of these comparisons are exact.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import read_shard_config
from dspark_trt.builder.checkpoint.sharding import convert_checkpoint
from dspark_trt.builder.network import Network, NetworkIO, load_network
from dspark_trt.plugins.markov_sampling import DRAFT_SALT
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.keyed_noise import RECOVERY_SALT, gumbel_sample
from dspark_trt.runtime_py.requests import FinishReason, RequestError, SamplingParams
from dspark_trt.runtime_py.session import SessionError, TorchSession, infer_shapes
from dspark_trt.runtime_py.verification import verify_greedy
from torch import Tensor

from tests.placeholder_engines import make_engines
from tests.released import tiny_config, write_checkpoint

SLOTS, CONTEXT_ROWS = 3, 64


@dataclasses.dataclass
class Model:
    """One tiny random checkpoint, loaded once."""

    build: BuildConfig
    target: Network
    draft: Network
    known: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)
    """Prompt -> the longest continuation by the target alone that was computed so far."""

    def decoder(self, draft: object | None) -> Decoder:
        return Decoder(
            TorchSession(self.target, SingleProcess()),
            draft,  # type: ignore[arg-type]
            target_config=self.target.model.config,  # type: ignore[arg-type]
            draft_config=self.draft.model.config,  # type: ignore[arg-type]
            build=self.build,
            communicator=SingleProcess(),
            check_lockstep=True,
        )


@pytest.fixture(scope="module", params=["v4", "v4.1"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(directory / "checkpoint", tiny_config(request.param), seed=3)
    convert_checkpoint(directory / "checkpoint", directory / "shards", tp_size=1)
    config = read_shard_config(directory / "shards")
    build = BuildConfig(max_batch_size=SLOTS, max_input_len=CONTEXT_ROWS, max_seq_len=400).checked(config.draft)
    networks = (load_network(kind, directory / "shards", 0, build) for kind in ("target", "draft"))
    return Model(build, *networks)


def all_rings(decoder: Decoder) -> list[Tensor]:
    return [ring for caches in decoder._host.rings for ring in caches.values()]


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]


def whole_text_features(model: Model, tokens: list[int]) -> Tensor:
    """Captured rows of one pass over ``tokens``, through a ring that holds them all."""
    config = model.target.model.config
    rings = [torch.zeros(1, 512, config.head_dim, dtype=torch.bfloat16)] * config.num_hidden_layers
    ids = torch.tensor(tokens, dtype=torch.int32)
    with torch.inference_mode():
        _, features, _ = model.target.model(
            ids, torch.arange(len(tokens), dtype=torch.int32), torch.zeros_like(ids), rings
        )
    return features


class ScriptedDraft:
    """Proposes the true continuation up to a chosen position, then something else."""

    def __init__(self, model: Model, texts: list[list[int]], keep: Callable[[], int]):
        self.io: NetworkIO = model.draft.io
        self.texts, self.keep = texts, keep
        self.features = [whole_text_features(model, text) for text in texts]
        self.inserted = [0] * len(texts)
        self.kept: list[int] = []

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict:
        return infer_shapes(self.io, inputs)

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        for row, position, slot in zip(
            inputs["target_features"],
            inputs["feature_positions"].tolist(),
            inputs["feature_slots"].tolist(),
            strict=True,
        ):
            # A prompt longer than the window starts with its last window; after that no row is left out.
            expected = self.inserted[slot]
            assert position == expected or (expected == 0 and position > 0)
            assert torch.equal(row, self.features[slot][position])
            self.inserted[slot] = position + 1
        for r, (anchor, position, slot) in enumerate(
            zip(*(inputs[n].tolist() for n in ("anchor_ids", "positions", "slots")), strict=True)
        ):
            text = self.texts[slot]
            assert text[position] == anchor
            # All context before the anchor, and nothing after it; a full call may leave rows to the next.
            full = len(inputs["feature_slots"]) == CONTEXT_ROWS
            assert self.inserted[slot] == position or (full and self.inserted[slot] < position)
            keep, width = self.keep(), outputs["draft_tokens"].shape[1]
            proposal = (text[position + 1 :] + [0] * width)[:width]
            if keep < width:
                proposal[keep] = (proposal[keep] + 1) % 300
            self.kept.append(keep)
            outputs["draft_tokens"][r] = torch.tensor(proposal, dtype=torch.int32)


def target_only(model: Model, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What the target alone continues the prompts with."""
    missing = [p for p in prompts if len(model.known.get(tuple(p), ())) < tokens]
    done, stats = model.decoder(None).generate(missing, SamplingParams(max_tokens=tokens, ignore_eos=True))
    assert stats.draft_calls == 0
    assert not missing or stats.tokens_per_step == 1
    model.known |= {tuple(c.prompt_ids): c.token_ids for c in done}
    return [model.known[tuple(p)][:tokens] for p in prompts]


@pytest.mark.parametrize("accepted", [*range(6), "random"])
def test_every_acceptance_length(model: Model, accepted: int | str) -> None:
    """KV-3, KV-4, POS-1: text and draft context equal plain decoding for none, some and all drafts
    accepted, far past the window, for prompts below, at and above it."""
    prompts = prompts_of(1, 32, 75)
    pick = random.Random(5)
    keep = (lambda: pick.randint(0, 5)) if accepted == "random" else (lambda: int(accepted))
    # More tokens than are asked for: what stands after the last one may still be proposed.
    outputs = target_only(model, prompts, 46)
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    draft = ScriptedDraft(model, texts, keep)
    done, stats = model.decoder(draft).generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [c.token_ids for c in done] == [o[:40] for o in outputs]
    assert all(c.finish_reason is FinishReason.LENGTH for c in done)
    if accepted != "random":
        assert stats.accepted_per_position == [stats.steps * (i < int(accepted)) for i in range(5)]
        assert stats.tokens_per_step == pytest.approx(int(accepted) + 1, rel=0.1)


def test_many_random_steps(model: Model) -> None:
    """KV-3, KV-4: a long run of random acceptance on one slot, many times round both rings."""
    prompts = prompts_of(40)
    texts = [prompts[0] + target_only(model, prompts, 170)[0]]
    pick = random.Random(1)
    draft = ScriptedDraft(model, texts, lambda: pick.choice((0, 0, 0, 1, 2, 5)))
    done, stats = model.decoder(draft).generate(prompts, SamplingParams(max_tokens=160, ignore_eos=True))
    assert done[0].token_ids == texts[0][40:200]
    assert stats.steps > 50


def test_real_draft_keeps_target_text(model: Model) -> None:
    """The untrained draft changes nothing but the number of steps; more prompts than slots; any order."""
    prompts = prompts_of(3, 50, 9, 33, 120)
    outputs = target_only(model, prompts, 20)
    order = [4, 2, 0, 3, 1]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    draft = TorchSession(model.draft, SingleProcess())
    done, _ = model.decoder(draft).generate([prompts[i] for i in order], params)
    assert [c.token_ids for c in done] == [outputs[i] for i in order]
    alone, _ = model.decoder(draft).generate([prompts[1]], params)
    assert alone[0].token_ids == outputs[1]


def test_more_context_than_a_call_takes(model: Model) -> None:
    """Prompts that enter together hand the draft up to a window of rows each; an engine's call takes fewer."""
    rows: list[int] = []

    class Watched(TorchSession):
        def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
            rows.append(len(inputs["target_features"]))
            super().run(inputs, outputs)

    params, found = SamplingParams(max_tokens=12, ignore_eos=True), []
    for limit in (None, 10_000):
        rows.clear()
        decoder = model.decoder(Watched(model.draft, SingleProcess()))
        decoder._host._max_context_rows = limit or decoder._host._max_context_rows
        done, _ = decoder.generate(prompts_of(40, 33, 50), params)
        found.append(([c.token_ids for c in done], all_rings(decoder), max(rows)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert [most for _, _, most in found] == [CONTEXT_ROWS, 96]


class RecordedDraft(TorchSession):
    """Keeps what each step drafted and how sure it was."""

    def __init__(self, model: Model):
        super().__init__(model.draft, SingleProcess())
        self.steps: list[tuple[Tensor, Tensor]] = []

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        super().run(inputs, outputs)
        self.steps.append((outputs["draft_tokens"].clone(), outputs["confidence"].clone()))


def test_slots_are_reused_without_traces(model: Model) -> None:
    """KV-1, KV-2: a request in a slot that another one left behind gives what a fresh decoder gives: the text, which
    the target alone decides, and every draft and confidence, bit for bit, which show a stale window."""
    prompts = prompts_of(120, 2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    draft = RecordedDraft(model)
    decoder = model.decoder(draft)

    def alone(decoder: Decoder, draft: RecordedDraft) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
        draft.steps = []
        done, _ = decoder.generate([prompts[1]], params)
        return done[0].token_ids, draft.steps

    decoder.generate([prompts[0]] * SLOTS, params)
    again = alone(decoder, draft)
    for ring in all_rings(decoder):
        ring.fill_(torch.nan)
    poisoned = alone(decoder, draft)
    other = RecordedDraft(model)
    fresh = alone(model.decoder(other), other)
    assert fresh[1] and all(confidence.isfinite().all() for _, confidence in fresh[1])
    for tokens, steps in (again, poisoned):
        assert tokens == fresh[0] and len(steps) == len(fresh[1])
        for found, wanted in zip(steps, fresh[1], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_stop_token_inside_accepted_drafts(model: Model) -> None:
    """A stop token among accepted drafts ends the output before it; what follows is not emitted."""
    prompts = prompts_of(10)
    text = target_only(model, prompts, 40)[0]
    cut = next(i for i in range(7, 40) if text[i] not in text[:i])
    draft = ScriptedDraft(model, [prompts[0] + text + [0] * 6], lambda: 5)
    streamed: list[int] = []
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[text[cut]])
    done, _ = model.decoder(draft).generate(prompts, params, lambda index, tokens: streamed.extend(tokens))
    assert done[0].token_ids == streamed == text[:cut]
    assert done[0].finish_reason is FinishReason.STOP


def test_eos_of_the_checkpoint_stops(model: Model) -> None:
    """The configuration's end token stops a request unless it is ignored."""
    prompts = prompts_of(10)
    text = target_only(model, prompts, 8)[0]
    stopping = dataclasses.replace(model.target.model.config, eos_token_ids=(text[3],))
    decoder = model.decoder(None)
    decoder._target_config = stopping
    done, _ = decoder.generate(prompts, SamplingParams(max_tokens=8))
    first = text.index(text[3])
    assert done[0].token_ids == text[:first]
    assert done[0].finish_reason is FinishReason.STOP


def test_each_prompt_has_its_own_parameters(model: Model) -> None:
    """Lengths differ within a batch; a short request leaves its slot to a waiting one."""
    prompts = prompts_of(5, 6, 7, 8)
    outputs = target_only(model, prompts, 15)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 15, 4, 9)]
    done, stats = model.decoder(TorchSession(model.draft, SingleProcess())).generate(prompts, params)
    assert [c.token_ids for c in done] == [o[:n] for o, n in zip(outputs, (1, 15, 4, 9), strict=True)]
    assert stats.tokens == 1 + 15 + 4 + 9 - 4  # the first token of each comes from the prefill


@pytest.mark.parametrize(
    ("prompts", "tokens", "message"),
    [
        ([[1, 2], []], 5, "prompt 1 is empty"),
        ([[1, 320]], 5, r"prompt 0 has token ids \[320\], expected integers 0..319"),
        ([[2], [1, 2.5, True, "3"]], 5, r"prompt 1 has token ids \[2\.5, True, '3'\], expected integers"),
        ([[-1]], 5, r"token ids \[-1\]"),
        ([[1] * 391], 5, r"needs 401 positions .* --max-seq-len 400"),
        ([[1]], 395, r"needs 401 positions"),
    ],
)
def test_prompts_that_do_not_fit(model: Model, prompts: list[list[Any]], tokens: int, message: str) -> None:
    """Refused before anything runs, with the limit and the value."""
    decoder = model.decoder(TorchSession(model.draft, SingleProcess()))
    before = [r.clone() for r in decoder._host.rings[0].values()]
    with pytest.raises(RequestError, match=message):
        decoder.generate(prompts, SamplingParams(max_tokens=tokens))
    assert all(torch.equal(a, b) for a, b in zip(before, decoder._host.rings[0].values(), strict=True))


@pytest.mark.parametrize("asked", [6, 7])
def test_more_drafts_than_a_block_are_refused(model: Model, asked: int) -> None:
    """POS-4: not cut down to the block without a word; every prompt that asks is named, and nothing runs."""
    params = [SamplingParams(max_tokens=4, num_draft_tokens=n, ignore_eos=True) for n in (5, asked, None, asked)]
    draft = RecordedDraft(model)
    decoder = model.decoder(draft)
    with pytest.raises(RequestError) as error:
        decoder.generate(prompts_of(3, 3, 3, 3), params)
    for prompt in (1, 3):
        assert f"prompt {prompt} has num_draft_tokens {asked}, the draft's block has 5; ask for 0..5" in str(
            error.value
        )
    assert "prompt 0" not in str(error.value) and "prompt 2" not in str(error.value)
    assert not draft.steps and not any(ring.any() for ring in all_rings(decoder))
    # A target alone drafts nothing, whatever is asked.
    assert model.decoder(None).generate(prompts_of(3), params[1])[0][0].token_ids


def test_positions_up_to_the_limit(model: Model) -> None:
    """The longest request that is accepted runs to its end."""
    done, _ = model.decoder(TorchSession(model.draft, SingleProcess())).generate(
        prompts_of(390), SamplingParams(max_tokens=5, ignore_eos=True)
    )
    assert len(done[0].token_ids) == 5


def test_profiling_leaves_no_trace(model: Model) -> None:
    """KV-5, KV-6: steps that only measure write nothing into the caches."""
    decoder = model.decoder(TorchSession(model.draft, SingleProcess()))
    caches = all_rings(decoder)
    for cache in caches:
        cache.fill_(3.0)
    table = decoder.profile_costs(replays=1)
    assert max(table.draft_seconds) == SLOTS and max(table.verify_seconds) == SLOTS * 6
    assert all(bool((cache == 3.0).all()) for cache in caches)


def test_verification() -> None:
    """The longest agreeing prefix counts; a later agreement does not; ties go to the lowest id."""
    logits = torch.zeros(4, 3, 5)
    for row, choices in enumerate(([1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 0, 0])):
        for position, token in enumerate(choices):
            logits[row, position, token] = 1.0
    logits[3] = 0  # all tied
    drafts = torch.tensor([[1, 2], [1, 0], [0, 2], [0, 0]], dtype=torch.int32)
    verdict = verify_greedy(drafts, logits)
    assert verdict.accepted == [2, 1, 0, 2]
    assert verdict.bonus == [3, 2, 1, 0]
    nothing = verify_greedy(torch.empty(4, 0, dtype=torch.int32), logits[:, :1])
    assert nothing.accepted == [0] * 4
    assert nothing.bonus == [1, 1, 1, 0]


def session_tensors(
    model: Model, requests: int, rows: int
) -> tuple[TorchSession, dict[str, Tensor], dict[str, Tensor]]:
    session = TorchSession(model.draft, SingleProcess())
    sizes = {"R": requests, "T": rows}
    inputs = {
        i.name: torch.zeros([sizes[d] if isinstance(d, str) else d for d in i.shape], dtype=i.dtype)
        for i in session.io.inputs
    }
    outputs = {}
    for name, info in session.infer_shapes({n: tuple(t.shape) for n, t in inputs.items()}).items():
        source = session.io.aliases.get(name)
        outputs[name] = inputs[source] if source else torch.empty(info.shape, dtype=info.dtype)
    return session, inputs, outputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, o: i.pop("slots"), "slots is missing"),
        (lambda i, o: i.update(extra=i["slots"]), "extra is not an input"),
        (lambda i, o: i.update(slots=i["slots"][:1]), r"slots has shape \[1\]"),
        (lambda i, o: i.update(slots=i["slots"].long()), r"slots is torch.int64, expected torch.int32"),
        (lambda i, o: i.update(target_features=i["target_features"].float()), "target_features is torch.float32"),
        (lambda i, o: o.pop("confidence"), "output confidence is missing"),
        (lambda i, o: o.update(draft_tokens=o["draft_tokens"][:, :4]), r"output draft_tokens is .*\[2, 4\]"),
        (lambda i, o: o.update(kv_ring_1_out=i["kv_ring_1"].clone()), "kv_ring_1_out must be bound to the tensor"),
    ],
)
def test_session_refuses(model: Model, change: Callable[..., object], message: str) -> None:
    """ENG-5 and wrong tensors: refused before anything is written."""
    session, inputs, outputs = session_tensors(model, 2, 7)
    rings = {n: t for n, t in inputs.items() if n.startswith("kv_ring")}
    inputs["target_features"] += 1
    change(inputs, outputs)
    with pytest.raises(SessionError, match=message):
        session.run(inputs, outputs)
    assert all(bool((t == 0).all()) for t in rings.values())


def test_session_needs_rows(model: Model) -> None:
    """ENG-3: a call without rows is refused with the dimension's name."""
    session, inputs, _ = session_tensors(model, 2, 7)
    shapes = {n: tuple(t.shape) for n, t in inputs.items()} | {"target_features": (0, 768)}
    shapes |= {"feature_positions": (0,), "feature_slots": (0,)}
    with pytest.raises(SessionError, match="T is 0, expected at least 1"):
        session.infer_shapes(shapes)


def test_a_sampler_needs_drafts_that_ask_it(tmp_path: Path) -> None:
    """The hook reaches drafting and verification alike, and greedy drafts refuse it."""
    calls: set[int] = set()

    def sampler(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
        calls.add(salt)
        return gumbel_sample(logits, temperature, seeds, positions, salt=salt)

    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    greedy, sampled = (make_engines(tmp_path, 1, max_seq_len=200, sampling=sampling) for sampling in (False, True))
    with pytest.raises(RequestError, match="built without --sampling, its drafts are greedy"):
        Decoder.from_dir(greedy, sampler=sampler, device="cpu")
    with Decoder.from_dir(sampled, sampler=sampler, device="cpu") as decoder:
        decoder.generate([[256, 72]], params)
    assert calls == {DRAFT_SALT, RECOVERY_SALT}
