"""What the networks hand to operations is what kernels take, and what steps do can be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import read_shard_config
from dspark_trt.builder.checkpoint.sharding import convert_checkpoint
from dspark_trt.builder.config import Numerics, parse_configs
from dspark_trt.builder.model.attention import LatentAttention
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.network import load_network
from dspark_trt.plugins import kernels, library
from dspark_trt.plugins.kernels import allocate_outputs, execute
from dspark_trt.plugins.library import KernelUnavailableError
from dspark_trt.plugins.op import Op, executor_scope
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.decoder import Decoder, Execution
from dspark_trt.runtime_py.device_step import DeviceStep
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.session import TorchSession, make_caches
from dspark_trt.runtime_py.slots import SlotState
from dspark_trt.runtime_py.verification import BlockVerification, StandardRejection
from torch import Tensor

from tests.op_examples import LABELS, example
from tests.released import tiny_config, write_checkpoint


class Checked:
    """Computes by reference what a kernel would take, and counts it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def execute(self, op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: Any) -> Any:
        strided = [s.name for s, t in zip(op.inputs(attributes), tensors, strict=True) if not t.is_contiguous()]
        assert not strided, f"{op.name}: {strided}"
        self.calls[op.name] += 1
        return op.reference(attributes, *tensors)

    @contextmanager
    def scope(self) -> Iterator[None]:
        with executor_scope(self.execute):
            yield


@pytest.mark.parametrize("variant", ["v4", "v4.1"])
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("anchor_first", [True, False])
def test_operations_get_contiguous_tensors(
    variant: str, numerics: Numerics, anchor_first: bool, tmp_path: Path
) -> None:
    """Prefill, steps of the host and steps on the device; both variants, numerics and layouts of the block."""
    write_checkpoint(tmp_path / "checkpoint", tiny_config(variant, dspark_sample_from_anchor=anchor_first), seed=3)
    convert_checkpoint(tmp_path / "checkpoint", tmp_path / "shards", tp_size=1)
    config = read_shard_config(tmp_path / "shards")
    build = BuildConfig(numerics=numerics, max_batch_size=2, max_input_len=64, max_seq_len=200, sampling=True)
    build = build.checked(config.draft)
    checked = Checked()
    target, draft = (
        TorchSession(load_network(kind, tmp_path / "shards", 0, build), SingleProcess(), scope=checked.scope)
        for kind in ("target", "draft")
    )
    assert config.target is not None
    decoder = Decoder(
        target,
        draft,
        target_config=config.target,
        draft_config=config.draft,
        build=build,
        communicator=SingleProcess(),
        execution=Execution(steps="device"),
    )
    penalized = SamplingParams(max_tokens=4, presence_penalty=0.5, ignore_eos=True)
    _, stats = decoder.generate([[1, 2, 3], [4]], [SamplingParams(max_tokens=9, ignore_eos=True), penalized])
    assert 0 < stats.device_steps < stats.decode_calls
    wanted = {"MhcCoefficients", "MhcAllReduceResidualOnly", "HcCollapse", "DraftAttention", "TargetAttention"}
    wanted |= {"ContextKvInsert", "MarkovSampling"}
    wanted |= {"MhcAllReduce"} if variant == "v4.1" else set()
    wanted |= {"QuantizedLinear", "RoutedExperts"} if numerics is Numerics.RELEASED else set()
    assert set(checked.calls) == wanted


def in_place(op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: Any) -> Any:
    """Computes by reference, and writes aliased outputs into their inputs, as a kernel does."""
    found = op.reference(attributes, *tensors)
    outputs = list(found) if isinstance(found, tuple) else [found]
    for output, source in op.aliases(attributes).items():
        outputs[output] = tensors[source].copy_(outputs[output])
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_probed_cache_entries_leave_their_source_as_it_is(numerics: Numerics) -> None:
    """The entries are written into rings that nobody else reads; the draft goes on with kv, not yet rotated."""
    config = parse_configs(tiny_config("v4.1"))[1]
    attention = LatentAttention(config, BuildContext(numerics, torch.bfloat16))
    kv = torch.randn(9, config.head_dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    before, positions = kv.clone(), torch.arange(5, 14, dtype=torch.int32)
    wanted = attention.cached(kv, positions)
    with executor_scope(in_place):
        found = attention.cached(kv, positions)
    assert torch.equal(kv, before)
    assert torch.equal(found, wanted) and not torch.equal(found, kv)


META = torch.device("meta")


def without_data(op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: dict[str, Any]) -> Any:
    """As a kernel is called: outputs of the declared shapes and dtypes on the device of the inputs, caches in place."""
    assert all(t.device == META for t in tensors), f"{op.name}: {[str(t.device) for t in tensors]}"
    outputs = allocate_outputs(op, attributes, tensors, bindings)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@contextmanager
def kernels_without_data() -> Iterator[None]:
    with executor_scope(without_data):
        yield


@pytest.mark.parametrize("variant", ["v4", "v4.1"])
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("method", [None, StandardRejection(), BlockVerification()])
def test_steps_need_nothing_from_the_host(variant: str, numerics: Numerics, method: Any, tmp_path: Path) -> None:
    """GR-4: on a device without data nothing can be read back, and nothing of the CPU's can be mixed in, so what runs
    there can be captured as far as torch goes."""
    write_checkpoint(tmp_path / "checkpoint", tiny_config(variant), seed=3)
    convert_checkpoint(tmp_path / "checkpoint", tmp_path / "shards", tp_size=1)
    draft_config = read_shard_config(tmp_path / "shards").draft
    build = BuildConfig(numerics=numerics, max_batch_size=2, max_input_len=64, max_seq_len=200, sampling=True)
    build = build.checked(draft_config)
    with torch.inference_mode():
        target, draft = (
            TorchSession(
                load_network(kind, tmp_path / "shards", 0, build).to(META), SingleProcess(), scope=kernels_without_data
            )
            for kind in ("target", "draft")
        )
        rings = make_caches(target, META), make_caches(draft, META)
        logits = torch.zeros(3, draft_config.block_size, draft_config.vocab_size, device=META)
        state = SlotState(2, draft_config.block_size, logits, META)
        step = DeviceStep(target, draft, rings, state, 2, method)
        step._host_report = torch.empty_like(step._report)  # the one copy that goes to the host
        for part in (step.target, step.verify, step.draft):
            part()


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("label", LABELS)
def test_an_operation_without_its_kernel_is_refused_on_a_gpu(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an older library, say; the reference would give what nobody asked for, at a fraction of the speed."""
    monkeypatch.setattr(kernels, "load_library", lambda: SimpleNamespace(_name="old.so"))
    call = example(label, torch.float32)
    bindings = call.op.bind(call.values, call.tensors)
    execute(call.op, call.values, call.tensors, bindings)
    with pytest.raises(KernelUnavailableError, match=r"old\.so has no dspark_\w+, expected one for .* build it again"):
        execute(call.op, call.values, [t.as_subclass(OnGpu) for t in call.tensors], bindings)


def test_a_gpu_without_the_library_is_told_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sessions on a GPU are who meets it."""
    monkeypatch.setattr(library, "find_library", lambda: None)
    library.load_library.cache_clear()
    with pytest.raises(
        KernelUnavailableError, match=r"was not found.*pass --device cpu, where operations run as their"
    ):
        library.load_library()
