"""How a whole draft network chooses its tokens: options, heads of checkpoints, blocks that begin with a bonus row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig, check_engine_draft
from dspark_trt.builder.config import ConfigError, Numerics
from dspark_trt.builder.model.markov import MarkovOptions
from dspark_trt.builder.network import load_network
from dspark_trt.builder.onnx_export import ExportError, export_network
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING, draw
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.session import TorchSession, make_caches, make_outputs
from torch import Tensor

from tests.configs import TinyCheckpoint
from tests.markov_examples import drawn_kinds, equal

Tiny = Callable[..., TinyCheckpoint]
both = pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])


def step_inputs(network: Any, requests: int = 2) -> dict[str, Tensor]:
    """Everything but the caches is small numbers in order."""
    session = TorchSession(network, SingleProcess())
    given, sizes = dict(make_caches(session)), {"R": requests, "T": 6}
    for info in session.io.inputs:
        if info.name not in given:
            shape = [sizes[d] if isinstance(d, str) else d for d in info.shape]
            given[info.name] = torch.arange(math.prod(shape)).view(shape).remainder(7).to(info.dtype)
    given["feature_slots"] = torch.zeros(6, dtype=torch.int32)
    return given


def one_step(network: Any, requests: int = 2) -> dict[str, Tensor]:
    session, given = TorchSession(network, SingleProcess()), step_inputs(network, requests)
    outputs = make_outputs(session, given, {name: given[name] for name in make_caches(session)})
    session.run(given, outputs)
    return outputs


def test_options_in_a_draft(tiny: Tiny, tmp_path: Path) -> None:
    """The whole network with options that change nothing, with a reduced vocabulary, and refused by the exporter."""
    shards, build = tiny("v4.1").shards(), BuildConfig(max_batch_size=2, sampling=True)

    def network(markov: MarkovOptions | None = None) -> Any:
        return load_network("draft", shards, 0, build, markov=markov)

    plain, vocab = one_step(network()), tiny("v4.1").draft_config.vocab_size
    everything = one_step(network(MarkovOptions(top_k=vocab)))
    assert all(torch.equal(plain[n], everything[n]) for n in ("draft_tokens", "confidence", "draft_logits"))
    odd = network(MarkovOptions(draft_ids=tuple(range(1, vocab, 2))))
    half = one_step(odd)
    assert half["draft_tokens"].remainder(2).eq(1).all()
    assert torch.equal(half["draft_logits"][:, 0, 1::2], plain["draft_logits"][:, 0, 1::2])
    with pytest.raises(ExportError, match=r"draft_ids=.*engines have the released Markov head only"):
        export_network(odd, tmp_path / "draft.onnx")
    hooked = network()
    hooked.model.sampler = lambda *tensors, salt: draw(*tensors, salt=salt)
    assert torch.equal(one_step(hooked)["draft_logits"], plain["draft_logits"])
    with pytest.raises(ExportError, match="a sampler of its own"):
        export_network(hooked, tmp_path / "draft.onnx")
    assert not list(tmp_path.iterdir())


def test_float64_noise_of_a_draft(tiny: Tiny) -> None:
    """By the build or by the options, in the operation and in the generic loop; no other logits at the first slot."""
    shards = tiny("v4.1").shards()
    plain = BuildConfig(max_batch_size=2, sampling=True)
    wide = dataclasses.replace(plain, float64_noise=True)
    narrow = one_step(load_network("draft", shards, 0, plain))["draft_logits"]
    by_build = load_network("draft", shards, 0, wide)
    by_options = load_network("draft", shards, 0, plain, markov=MarkovOptions(float64_noise=True))
    generic = load_network("draft", shards, 0, wide, markov=MarkovOptions(top_k=by_build.model.config.vocab_size))
    with drawn_kinds() as kinds:
        found = [one_step(network) for network in (by_build, by_options, generic)]
    assert kinds == {True}
    assert all(equal(one.values(), found[0].values()) for one in found[1:])
    assert by_build.model.plain_sampling and by_options.model.plain_sampling and not generic.model.plain_sampling
    assert torch.equal(found[0]["draft_logits"][:, 0], narrow[:, 0])
    with pytest.raises(ConfigError, match="float64_noise is of sampling drafts"):
        dataclasses.replace(wide, sampling=False).checked(by_build.model.config)


@both
def test_logits_are_an_output_of_sampling_drafts(tiny: Tiny, sampling: bool, tmp_path: Path) -> None:
    """The network, its operation's node and the exported model have them with sampling alone."""
    network = load_network("draft", tiny("v4.1").shards(), 0, BuildConfig(max_batch_size=2, sampling=sampling))
    assert ("draft_logits" in one_step(network)) == sampling
    model = onnx.load(export_network(network, tmp_path / "draft.onnx").path)
    (node,) = [n for n in model.graph.node if n.op_type == "MarkovSampling"]
    assert len(node.output) == (3 if sampling else 2)
    attributes = {a.name: a.i for a in node.attribute}
    assert attributes == {"block_size": 5, "sampling": sampling, "float64_noise": 0, "write_logits": sampling}


HEADS: list[dict[str, Any]] = [
    {"dspark_markov_head_type": "gated"},
    {"dspark_markov_head_type": "rnn"},
    {"dspark_logit_scale": 0.7, "dspark_final_logit_softcapping": 3.0, "dspark_apply_output_logit_transform": True},
    {"dspark_logit_scale": 0.7, "dspark_apply_output_logit_transform": False},
    {"dspark_markov_head_type": "rnn", "dspark_sample_from_anchor": False},
]


@pytest.mark.parametrize("variant", ["v4", "v4.1"])
@pytest.mark.parametrize("head", HEADS, ids=lambda h: "-".join(map(str, h.values())))
def test_heads_of_checkpoints(tiny: Tiny, variant: str, head: dict[str, Any], tmp_path: Path) -> None:
    """From released tensors by way of conversion: corrected logits by the formulas in float64, and no engine."""
    checkpoint = tiny(variant, **head)
    seen: dict[str, Tensor] = {}
    network = load_network(
        "draft",
        checkpoint.shards(),
        0,
        BuildConfig(max_batch_size=2, numerics=Numerics.DEQUANTIZED, dtype="float32"),
        probe=lambda name, tensor: seen.update({name: tensor}),
    )
    outputs, last = one_step(network), "mtp.2"
    released = {n.removeprefix(f"{last}."): t.double() for n, t in checkpoint.tensors.items() if n.startswith(last)}
    names = ("markov_w1", "markov_w2") if variant == "v4" else ("embed", "head")
    w1, w2 = (released[f"markov_head.{name}.weight"] for name in names)
    kind = head.get("dspark_markov_head_type", "vanilla")
    scale, cap = head.get("dspark_logit_scale", 1.0), head.get("dspark_final_logit_softcapping", math.inf)

    def transformed(x: Tensor) -> Tensor:
        return scale * x if cap == math.inf else cap * torch.tanh(scale * x / cap)

    hidden = seen["hidden_prenorm"].double()
    eps = network.model.config.rms_norm_eps
    normed = released["norm.weight"] * hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt()
    base = transformed(normed @ checkpoint.tensors["head.weight"].double().T)
    anchors = torch.arange(2).unsqueeze(1)
    before = torch.cat((anchors, outputs["draft_tokens"][:, :-1]), 1).long()
    state = torch.zeros(2, w1.shape[1]).double()
    for i in range(5):
        e, h = w1[before[:, i]], normed[:, i]
        mixed = e
        if kind == "gated":
            weight, shift = released["markov_head.gate_proj.weight"], released["markov_head.gate_proj.bias"]
            mixed = torch.sigmoid(torch.cat((h, e), 1) @ weight.T + shift) * e
        elif kind == "rnn":
            weight, shift = released["markov_head.joint_proj.weight"], released["markov_head.joint_proj.bias"]
            g, c, o = (torch.cat((state, e, h), 1) @ weight.T + shift).chunk(3, 1)
            mixed, state = torch.tanh(o), torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
        bias = mixed @ w2.T
        if head.get("dspark_apply_output_logit_transform"):
            bias = transformed(bias)
        # Float32 sums of 256 products on the way to the base logits.
        assert torch.allclose(seen["corrected_logits"][:, i].double(), base[:, i] + bias, atol=1e-4)
    assert torch.equal(outputs["draft_tokens"], seen["corrected_logits"].argmax(-1).int())
    assert not network.model.plain_sampling
    with pytest.raises(ExportError, match=f"a {kind} head"):
        export_network(network, tmp_path / "draft.onnx")
    with pytest.raises(ConfigError, match=f"the draft has a {kind} Markov head.*run it with torch sessions"):
        check_engine_draft(network.model.config)


# The bonus row ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["v4", "v4.1"])
def test_decoding_with_drafts_that_do_not_sample_from_the_anchor(tiny: Tiny, variant: str) -> None:
    """POS-2: five drafts from six rows; greedy text is the target's own, in any order and number of requests."""
    checkpoint = tiny(variant, dspark_sample_from_anchor=False)
    shards = checkpoint.shards()
    build = BuildConfig(max_batch_size=3, max_input_len=64, max_seq_len=400).checked(checkpoint.draft_config)
    assert build.num_draft_tokens == 5
    target, draft = (
        TorchSession(load_network(kind, shards, 0, build), SingleProcess()) for kind in ("target", "draft")
    )
    prompts = [[3, 9, 27, 81], [5] * 40, [250, 1, 2], [7]]

    def decode(given: list[list[int]], session: TorchSession | None) -> list[list[int]]:
        decoder = Decoder(
            target,
            session,
            target_config=checkpoint.target_config,
            draft_config=checkpoint.draft_config,
            build=build,
            communicator=SingleProcess(),
        )
        done, stats = decoder.generate(given, SamplingParams(max_tokens=20, ignore_eos=True))
        assert (stats.draft_calls > 0) == (session is not None)
        assert len(stats.proposed_per_position) == (5 if session else 0)
        return [c.token_ids for c in done]

    wanted = decode(prompts, None)
    assert decode(prompts, draft) == wanted and decode(prompts[::-1], draft) == wanted[::-1]
    assert decode(prompts[1:2], draft) == wanted[1:2]


@both
def test_noise_of_slots_behind_a_bonus_row(tiny: Tiny, sampling: bool) -> None:
    """Spec 5.5: a token's key is the position in front of it, whichever row predicts it, and its bias is that of the
    token in front: the operation on the same base logits, from the anchor and its position."""
    checkpoint = tiny("v4.1", dspark_sample_from_anchor=False)
    seen: dict[str, Tensor] = {}
    build = BuildConfig(max_batch_size=2, sampling=sampling)
    network = load_network(
        "draft", checkpoint.shards(), 0, build, probe=lambda name, tensor: seen.update({name: tensor})
    )
    outputs = one_step(network)
    head = network.model.mtp[-1].markov_head
    keys = [torch.arange(2).int(), torch.arange(2).float(), torch.arange(4).view(2, 2).int()] if sampling else []
    tokens, features, corrected = MARKOV_SAMPLING(
        seen["base_logits"],
        torch.arange(2).int(),
        head.embed.weight,
        head.head.weight,
        *keys,
        block_size=5,
        sampling=sampling,
        float64_noise=False,
        write_logits=True,
    )
    assert torch.equal(outputs["draft_tokens"], tokens) and torch.equal(seen["corrected_logits"], corrected)
    confidence = network.model.mtp[-1].confidence_head(seen["hidden_prenorm"], features)
    assert torch.equal(outputs["confidence"], confidence)


def test_export_of_a_draft_with_a_bonus_row(tiny: Tiny, tmp_path: Path) -> None:
    """ONNX Runtime on the exported model: five tokens of six rows, for other numbers of requests than traced."""
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint = tiny("v4.1", dspark_sample_from_anchor=False)
    build = BuildConfig(max_batch_size=4, numerics=Numerics.DEQUANTIZED, dtype="float32")
    network = load_network("draft", checkpoint.shards(), 0, build)
    path = export_network(network, tmp_path / "draft.onnx").path
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for requests in (1, 3):
        given = step_inputs(network, requests=requests)
        found = dict(
            zip(
                (o.name for o in session.get_outputs()),
                session.run(None, {name: tensor.numpy() for name, tensor in given.items()}),
                strict=True,
            )
        )
        wanted = one_step(network, requests=requests)
        assert found["draft_tokens"].shape == (requests, 5)
        assert (found["draft_tokens"] == wanted["draft_tokens"].numpy()).all()
        assert abs(found["confidence"] - wanted["confidence"].numpy()).max() < 1e-4
