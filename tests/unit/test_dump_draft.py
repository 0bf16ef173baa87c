"""examples/dump_draft.py: names and shapes, what each tensor is, other ways in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import convert_checkpoint, read_shard_config
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.network import load_network
from dspark_trt.builder.onnx_export import Probes, export_network
from dspark_trt.runtime_py import decoder, verification
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.session import TorchSession
from dspark_trt.runtime_py.verification import verify_greedy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.configs import TinyCheckpoint
from tests.example_scripts import CHECKPOINT, load_example
from tests.released import tiny_config, write_checkpoint

dump_draft = load_example("dump_draft")

Dump = Callable[..., dict[str, Tensor]]
TEXTS = (
    "It was",
    # Longer than the window of 128: its first rows are in the file, but not in the rings.
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and their residence was at "
    "Norland Park, in the centre of their property,",
)
PROMPTS = [[256, *text.encode()] for text in TEXTS]
ROUNDING = 2e-5
"""Of float32, as a share of the largest value: about eight times the largest that two orders of summation differ."""


def write_prompts(path: Path, prompts: list[list[int]]) -> Path:
    path.write_text("\n".join(" ".join(map(str, p)) for p in prompts))
    return path


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """``dump(mode)``: the file of the trained checkpoint and :data:`PROMPTS`, made once a mode."""
    made: dict[str, dict[str, Tensor]] = {}
    directory = tmp_path_factory.mktemp("dump")
    prompts = write_prompts(directory / "prompts.txt", PROMPTS)

    def make(mode: str) -> dict[str, Tensor]:
        if mode not in made:
            output = directory / f"{mode}.safetensors"
            arguments = ["--checkpoint", str(CHECKPOINT), "--prompt-ids", str(prompts), "--output", str(output)]
            assert dump_draft.main([*arguments, "--mode", mode]) == 0
            made[mode] = load_file(output)
        return made[mode]

    return make


def close(found: Tensor, wanted: Tensor) -> bool:
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape
    return bool((found - wanted).abs().max() <= ROUNDING * wanted.abs().max())


# ----------------------------------------------------------------------------------- names and shapes


@pytest.mark.parametrize(("mode", "dtype"), [("released", torch.bfloat16), ("dequantized", torch.float32)])
def test_names_shapes_and_dtypes(dump: Dump, mode: str, dtype: torch.dtype) -> None:
    rows, count, block, hidden, width, vocab = sum(map(len, PROMPTS)), 2, 5, 256, 64, 264
    wanted: dict[str, tuple[list[int], torch.dtype]] = {
        "anchor_ids": ([count], torch.int32),
        "context_features": ([rows, 3 * hidden], dtype),
        "context_positions": ([rows], torch.int32),
        "context_request": ([rows], torch.int32),
        "anchor_positions": ([count], torch.int32),
        "positions": ([count, block], torch.int32),
        "main_x": ([rows, hidden], dtype),
        "hidden_prenorm": ([count, block, hidden], dtype),
        "base_logits": ([count, block, vocab], torch.float32),
        "corrected_logits": ([count, block, vocab], torch.float32),
        "draft_tokens": ([count, block], torch.int32),
        "confidence": ([count, block], torch.float32),
    }
    for s in range(3):
        wanted[f"stage{s}_context_kv"] = ([rows, width], dtype)
        for name in ("attn_in", "attn_out", "ffn_in", "ffn_out"):
            wanted[f"stage{s}_{name}"] = ([count, block, hidden], dtype)
        for name in ("mid_streams", "streams"):
            wanted[f"stage{s}_{name}"] = ([count, block, 4, hidden], dtype)
        for name in ("attn_pre", "attn_post", "ffn_pre", "ffn_post"):
            wanted[f"stage{s}_{name}"] = ([count, block, 4], torch.float32)
        for name in ("attn_comb", "ffn_comb"):
            wanted[f"stage{s}_{name}"] = ([count, block, 4, 4], torch.float32)
    found = dump(mode)
    assert {name: (list(t.shape), t.dtype) for name, t in found.items()} == wanted
    assert sorted(dump_draft.tensor_names(3)) == sorted(wanted)
    assert all(bool(t.isfinite().all()) for t in found.values() if t.is_floating_point())


def test_the_step_starts_behind_the_prompts(dump: Dump) -> None:
    found = dump("released")
    lengths = [len(p) for p in PROMPTS]
    assert found["context_positions"].tolist() == [*range(lengths[0]), *range(lengths[1])]
    assert found["context_request"].tolist() == [0] * lengths[0] + [1] * lengths[1]
    assert found["anchor_positions"].tolist() == lengths
    assert found["positions"].tolist() == [list(range(n, n + 5)) for n in lengths]


def test_facts_about_the_file(tmp_path: Path) -> None:
    output, umask = tmp_path / "new" / "step.safetensors", os.umask(0o022)
    os.umask(umask)
    prompts = write_prompts(tmp_path / "prompts.txt", PROMPTS[:1])
    arguments = ["--checkpoint", str(CHECKPOINT), "--prompt-ids", str(prompts), "--output", str(output)]
    assert dump_draft.main([*arguments, "--mode", "dequantized", "--dtype", "float16"]) == 0
    with safe_open(output, "pt") as file:
        facts = file.metadata()
    assert (facts["mode"], facts["dtype"], len(facts["weights_hash"])) == ("dequantized", "float16", 64)
    assert load_file(output)["stage1_streams"].dtype == torch.float16
    assert sorted(p.name for p in output.parent.iterdir()) == ["step.safetensors"], "no shards are left behind"
    assert output.stat().st_mode & 0o777 == 0o666 & ~umask, "readable as other files"


# ---------------------------------------------------------------------------------- what they are


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "tp1"
    convert_checkpoint(CHECKPOINT, path, tp_size=1)
    return path


def build_of(shards: Path, mode: str) -> BuildConfig:
    dtype: Any = "bfloat16" if mode == "released" else "float32"
    build = BuildConfig(numerics=Numerics(mode), dtype=dtype, max_batch_size=2)
    return build.checked(read_shard_config(shards).draft)


@pytest.mark.parametrize("mode", ["released", "dequantized"])
def test_the_step_is_the_decoders(dump: Dump, shards: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors and drafts are those of the decode loop's first step on the same prompts."""
    source, build = read_shard_config(shards), build_of(shards, mode)
    assert source.target is not None
    drafted: list[Tensor] = []

    def watch(drafts: Tensor, logits: Tensor) -> Any:
        drafted.append(drafts)
        return verify_greedy(drafts, logits)

    monkeypatch.setattr(verification, "verify_greedy", watch)
    sessions = [TorchSession(load_network(k, shards, 0, build), SingleProcess()) for k in ("target", "draft")]
    loop = decoder.Decoder(
        sessions[0],
        sessions[1],
        target_config=source.target,
        draft_config=source.draft,
        build=build,
        communicator=SingleProcess(),
    )
    completions, _ = loop.generate(PROMPTS, SamplingParams(max_tokens=2, ignore_eos=True))
    found = dump(mode)
    assert found["anchor_ids"].tolist() == [c.token_ids[0] for c in completions]
    assert torch.equal(found["draft_tokens"], next(d for d in drafted if d.numel()))


@pytest.mark.parametrize("mode", ["released", "dequantized"])
def test_context_rows_are_as_cached(dump: Dump, shards: Path, mode: str) -> None:
    """stage{s}_context_kv holds the very entries of the rings: rotated, and in released mode rounded."""
    network, found, window = load_network("draft", shards, 0, build_of(shards, mode)), dump(mode), 128
    context = [found[f"context_{name}"] for name in ("features", "positions", "request")]
    slots = torch.tensor([0, 1], dtype=torch.int32)
    rings = dump_draft.rings(network)
    with torch.inference_mode():
        outputs = network(found["anchor_ids"], found["anchor_positions"], slots, *context, *rings)
    for stage, ring in enumerate(outputs[2:]):
        for request, prompt in enumerate(PROMPTS):
            rows = found[f"stage{stage}_context_kv"][found["context_request"] == request][-window:]
            places = torch.arange(len(prompt))[-window:] % window
            assert torch.equal(ring[request][places], rows)


def mixed(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k * out + sum_j comb[j, k] * streams_j (spec 3.3)."""
    return post[..., None] * out[..., None, :] + torch.einsum("rbjk,rbjh->rbkh", comb, streams)


def collapsed(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("rbj,rbjh->rbh", pre, streams)


@pytest.mark.parametrize("variant", ["trained v4.1", "v4", "v4.1"])
def test_tensors_are_what_their_names_say(
    variant: str, dump: Dump, tiny: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    """The data flow of spec 3.4 and 5.2 holds between the tensors: whose pre collapses which streams, the
    first index of comb is the source, Markov biases on top of the base logits."""
    if variant == "trained v4.1":
        found = dump("dequantized")
        released = {k: v for f in CHECKPOINT.glob("*.safetensors") for k, v in load_file(f).items()}
    else:
        released, prompts = tiny(variant).tensors, write_prompts(tmp_path / "p.txt", [[1, 2, 3], list(range(9, 49))])
        checkpoint = str(tiny(variant).directory / "released")
        arguments = ["--checkpoint", checkpoint, "--prompt-ids", str(prompts), "--output", str(tmp_path / "f")]
        assert dump_draft.main([*arguments, "--mode", "dequantized"]) == 0
        found = load_file(tmp_path / "f")
    v4, first, rows = variant == "v4", "markov_w1" if variant == "v4" else "embed", found["anchor_ids"].shape[0]
    noise = 258 if variant == "trained v4.1" else 319
    ids = torch.cat((found["anchor_ids"].unsqueeze(1), torch.full((rows, 4), noise)), 1)
    streams = released["embed.weight"][ids].float().unsqueeze(2).expand(-1, -1, 4, -1)
    previous = torch.tensor([1.0, 0, 0, 0]).expand(rows, 5, 4)
    for s in range(3):
        names = ("in", "out", "pre", "post", "comb")
        attn, ffn = ({n: found[f"stage{s}_{kind}_{n}"] for n in names} for kind in ("attn", "ffn"))
        assert close(attn["in"], collapsed(streams, attn["pre"] if v4 else previous))
        before, streams = streams, found[f"stage{s}_mid_streams"]
        assert close(streams, mixed(before, attn["out"], attn["post"], attn["comb"]))
        assert close(ffn["in"], collapsed(streams, ffn["pre"] if v4 else attn["pre"]))
        before, streams = streams, found[f"stage{s}_streams"]
        assert close(streams, mixed(before, ffn["out"], ffn["post"], ffn["comb"]))
        previous = ffn["pre"]
    hidden = found["hidden_prenorm"]
    if not v4:
        assert close(hidden, collapsed(streams, previous))
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True)) * released["mtp.2.norm.weight"].float()
    assert close(found["base_logits"], normed @ released["head.weight"].float().T)
    inputs = torch.cat((found["anchor_ids"].unsqueeze(1), found["draft_tokens"][:, :-1]), 1)
    embed = released[f"mtp.2.markov_head.{first}.weight"].float()[inputs]
    second = released[f"mtp.2.markov_head.{'markov_w2' if v4 else 'head'}.weight"].float()
    assert close(found["corrected_logits"], found["base_logits"] + embed @ second.T)
    assert torch.equal(found["corrected_logits"].argmax(-1), found["draft_tokens"].long())
    weight = released["mtp.2.confidence_head.proj.weight"].float()
    assert close(found["confidence"], (torch.cat((hidden, embed), -1) @ weight.T).squeeze(-1))


def test_the_onnx_model_has_the_same_tensors(dump: Dump, shards: Path, tmp_path: Path) -> None:
    """Optional debug outputs under the names of the file; ONNX Runtime gives their values."""
    found, probes = dump("dequantized"), Probes(5)
    network = load_network("draft", shards, 0, build_of(shards, "dequantized"), probe=probes.record)
    model = export_network(network, tmp_path / "draft.onnx", probes=probes)
    rings = zip(network.io.aliases.values(), dump_draft.rings(network), strict=True)
    feeds = {name: ring.numpy() for name, ring in rings} | {
        "anchor_ids": found["anchor_ids"].numpy(),
        "positions": found["anchor_positions"].numpy(),
        "slots": torch.tensor([0, 1], dtype=torch.int32).numpy(),
        "target_features": found["context_features"].numpy(),
        "feature_positions": found["context_positions"].numpy(),
        "feature_slots": found["context_request"].numpy(),
    }
    session = onnxruntime.InferenceSession(str(model.path), providers=["CPUExecutionProvider"])
    outputs = dict(zip(model.outputs, session.run(None, feeds), strict=True))
    computed = dump_draft.tensor_names(3)[6:]  # what comes before are the step's inputs
    assert computed[0] == "main_x" and not set(computed) - set(outputs)
    wrong = [name for name in computed if not close(torch.from_numpy(outputs[name]), found[name])]
    assert not wrong
    # ENG-7: an engine's model, with nothing marked that stands in the way of fusions, decides and estimates the same.
    plain = export_network(load_network("draft", shards, 0, build_of(shards, "dequantized")), tmp_path / "plain.onnx")
    assert plain.outputs == tuple(o.name for o in network.io.outputs) and len(model.outputs) > len(plain.outputs)
    bare = onnxruntime.InferenceSession(str(plain.path), providers=["CPUExecutionProvider"])
    for name, value in zip(plain.outputs, bare.run(None, feeds), strict=True):
        marked, unmarked = torch.from_numpy(outputs[name]), torch.from_numpy(value)
        assert torch.equal(marked, unmarked) if name == "draft_tokens" else close(unmarked, marked), name


# -------------------------------------------------------------------------------------- ways in


def test_features_instead_of_prompts(dump: Dump, tmp_path: Path) -> None:
    """A file with the target's part gives the same step, also when its rows are in another order and wider."""
    found = dump("released")
    order = torch.randperm(len(found["context_positions"]), generator=torch.Generator().manual_seed(0))
    given = {n: found[n][order] for n in ("context_features", "context_positions", "context_request")}
    given["context_features"] = given["context_features"].float()
    given["context_positions"] = given["context_positions"].long()
    save_file({**given, "anchor_ids": found["anchor_ids"].long()}, tmp_path / "features")
    arguments = ["--checkpoint", str(CHECKPOINT), "--features", str(tmp_path / "features")]
    assert dump_draft.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    again = load_file(tmp_path / "out")
    for name, tensor in found.items():
        rows = tensor[order] if "context" in name or name == "main_x" else tensor
        assert torch.equal(again[name], rows), name


def test_a_target_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compressed attention: prompts are refused with the way out, and features work."""
    config = tiny_config("v4.1", compress_ratios=[0, 0, 4, 128, 0, 0, 0])
    write_checkpoint(tmp_path / "released", config)
    arguments = ["--checkpoint", str(tmp_path / "released"), "--output", str(tmp_path / "out")]
    prompts = write_prompts(tmp_path / "prompts.txt", [[1, 2, 3]])
    assert dump_draft.main([*arguments, "--prompt-ids", str(prompts)]) == 2
    assert "compressed attention, which this version does not run; pass --features" in capsys.readouterr().err
    features = {
        "anchor_ids": torch.tensor([5]),
        "context_features": torch.randn(4, 3 * 256),
        "context_positions": torch.arange(10, 14),
        "context_request": torch.zeros(4, dtype=torch.int32),
    }
    save_file(features, tmp_path / "features")
    assert dump_draft.main([*arguments, "--features", str(tmp_path / "features")]) == 0
    assert load_file(tmp_path / "out")["positions"].tolist() == [[14, 15, 16, 17, 18]]


@pytest.mark.parametrize("text", ["256 1 2\n\n256,3\n", "256, 1, 2,\n256\t3", json.dumps([[256, 1, 2], [256, 3]])])
def test_ways_to_write_prompts(text: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(text)
    assert dump_draft.read_prompt_ids(tmp_path / "prompts") == [[256, 1, 2], [256, 3]]
