"""What the ranks of a job set up between their GPUs: a mailbox, NCCL, both, or an error; the same on every rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE_RESIDUAL_ONLY
from dspark_trt.runtime_py import device as device_module
from dspark_trt.runtime_py.boundary import BoundaryError
from dspark_trt.runtime_py.communicator import Communicator, LaunchError, SingleProcess
from dspark_trt.runtime_py.device import Platform, open_engine_platform, open_platform
from dspark_trt.runtime_py.mailbox import MailboxError
from dspark_trt.runtime_py.opening import detokenizer, open_decoder
from dspark_trt.runtime_py.requests import RequestError
from torch import Tensor

from tests.placeholder_engines import make_engines
from tests.thread_ranks import outcomes

GPU = torch.device("cuda", 0)


class FakeMailbox:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeGroup:
    def __init__(self) -> None:
        self.closed, self.rows = False, 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.rows = len(tensor)
        return tensor + tensor

    def close(self) -> None:
        self.closed = True


class FakeSide:
    """Computes by reference, as ranks whose kernels see no peer: what a fused boundary calls is told from the stock."""

    def __init__(self, device: torch.device):
        self.ranks_of_boundaries: list[int] = []

    def execute(self, op: Any, attributes: Any, tensors: Any, bindings: Any) -> Any:
        if op is MHC_ALL_REDUCE_RESIDUAL_ONLY:
            self.ranks_of_boundaries.append(attributes.tp_size)
            return tensors[1] + tensors[0].unsqueeze(1)
        raise AssertionError(op.name)

    def joined(self) -> Any:
        return device_module.nullcontext()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the GPUs; ``reason`` is why there is no mailbox."""
    state: dict[str, Any] = {"reason": "", "sides": []}

    def mailbox(communicator: Communicator, *arguments: Any, **options: Any) -> FakeMailbox:
        if state["reason"]:
            raise MailboxError(state["reason"])
        return FakeMailbox()

    def side(device: torch.device) -> FakeSide:
        state["sides"].append(FakeSide(device))
        return state["sides"][-1]

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(device_module, "load_library", lambda: None)
    monkeypatch.setattr(device_module, "SideStream", side)
    monkeypatch.setattr(device_module.Mailbox, "create", mailbox)
    monkeypatch.setattr(device_module, "open_group", lambda communicator, device: FakeGroup())
    return state


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def engines(root: Path, tp_size: int = 2, **build: Any) -> EngineDir:
    name = root / "-".join([f"tp{tp_size}", *(f"{k}.{v}" for k, v in build.items())])
    return EngineDir.open(name if name.exists() else make_engines(root, tp_size, **build))


def platforms(directory: EngineDir) -> list[Platform]:
    found = outcomes(2, lambda c: open_platform(directory, c, GPU, side_stream=True, peer_timeout_s=1), timeout_s=20)
    assert all(isinstance(f, Platform) for f in found), found
    return found  # type: ignore[return-value]


def boundary(platform: Platform, rows: int) -> Tensor:
    partial, streams = torch.ones(rows, 8), torch.zeros(rows, 4, 8)
    with platform.scope():
        out: Tensor = MHC_ALL_REDUCE_RESIDUAL_ONLY(
            partial,
            streams,
            torch.ones(rows, 4),
            torch.ones(rows, 4, 4),
            torch.zeros(2, 2, dtype=torch.int32),
            tp_size=2,
        )
    return out


def test_small_calls_need_the_mailbox_alone(root: Path, gpus: dict[str, Any]) -> None:
    for platform in platforms(engines(root, max_input_len=256)):
        assert platform.mailbox and platform.group is None
        assert boundary(platform, 256)[0, 0, 0] == 1.0
        with pytest.raises(BoundaryError, match="more rows than any call of these engines, so NCCL was not opened"):
            boundary(platform, 257)


def test_sampling_split_by_requests_needs_nccl(root: Path, gpus: dict[str, Any]) -> None:
    """However small the calls are; by vocabulary it exchanges through the mailbox."""
    for platform in platforms(engines(root, max_input_len=256, request_split_from=2)):
        assert platform.mailbox and platform.group
        assert boundary(platform, 256)[0, 0, 0] == 1.0
    for platform in platforms(engines(root, max_input_len=256, vocabulary_split_from=2)):
        assert platform.mailbox and platform.group is None


def test_large_calls_take_nccl_and_small_ones_the_mailbox(
    root: Path, gpus: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dspark_trt"):
        found = platforms(engines(root))
    for platform in found:
        assert platform.mailbox and platform.group
        assert boundary(platform, 256)[0, 0, 0] == 1.0
        assert boundary(platform, 257)[0, 0, 0] == 2.0
        assert platform.group.rows == 257  # type: ignore[attr-defined]
    assert {rank for side in gpus["sides"] for rank in side.ranks_of_boundaries} == {1, 2}
    (said,) = [record.getMessage() for record in caplog.records]  # rank 0 alone
    assert said.endswith("1024 rows are more than the 256 of the mailbox")


def test_without_a_mailbox_everything_takes_nccl(root: Path, gpus: dict[str, Any]) -> None:
    """TP-8: the GPUs can't reach each other."""
    gpus["reason"] = "cudaIpcOpenMemHandle failed"
    for platform in platforms(engines(root, max_input_len=256)):
        assert platform.mailbox is None
        assert boundary(platform, 1)[0, 0, 0] == 2.0


def test_what_was_opened_is_closed(root: Path, gpus: dict[str, Any]) -> None:
    for platform in platforms(engines(root)):
        platform.close()
        assert platform.mailbox.closed and platform.group.closed  # type: ignore[union-attr]


def test_one_rank_needs_neither(root: Path, gpus: dict[str, Any]) -> None:
    for side_stream in (True, False):
        options = {"side_stream": side_stream, "peer_timeout_s": 1}
        platform = open_platform(engines(root, 1), SingleProcess(), GPU, **options)  # type: ignore[arg-type]
        assert platform.mailbox is platform.group is None


def test_products_on_a_gpu_are_summed_wide(root: Path, gpus: dict[str, Any]) -> None:
    """SMP-12: torch lets parts of a long sum meet in float16, where 65504 is the end, unless it is told otherwise.
    Whoever shares the process has the settings back."""
    products = torch.backends.cuda.matmul

    def settings() -> tuple[bool, bool]:
        return products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction

    before = settings()
    for found in (
        open_platform(engines(root, 1), SingleProcess(), GPU, side_stream=True, peer_timeout_s=1),
        *platforms(engines(root, max_input_len=256)),
    ):
        try:
            products.allow_fp16_reduced_precision_reduction = products.allow_bf16_reduced_precision_reduction = True
            with found.scope():
                assert settings() == (False, False)
            assert settings() == (True, True)
        finally:
            products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize(("counts", "said"), [((43, 64), True), ((4, 64), False), (None, False)])
def test_counts_too_large_for_fused_boundaries_are_told_at_the_start(
    counts: tuple[int, ...] | None, said: bool, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0 alone, with the count to add."""
    directory = engines(root, max_batch_size=64).path

    def opened(communicator: Communicator) -> None:
        open_decoder(directory, communicator=communicator, device="cpu", request_counts=counts).close()

    with caplog.at_level(logging.WARNING, logger="dspark_trt"):
        assert outcomes(2, opened) == [None, None]
    messages = [record.getMessage() for record in caplog.records if "fused boundaries" in record.getMessage()]
    assert len(messages) == said
    if said:
        assert "of 43 requests, has 258 rows, they take 256; add 42 to --request-counts" in messages[0]


def test_ranks_with_other_options_are_refused_together(root: Path) -> None:
    """TP-5: captured steps of other sizes, or a draft on one rank only, would leave each other waiting."""
    directory = engines(root).path

    def opened(communicator: Communicator) -> None:
        counts = (1, 2) if communicator.rank else (1, 4)
        open_decoder(
            directory,
            communicator=communicator,
            device="cpu",
            request_counts=counts,
            speculative=bool(communicator.rank),
        )

    for found in outcomes(2, opened, timeout_s=20):
        assert isinstance(found, LaunchError)
        assert (
            "give every rank the same. speculative: rank 0 False, rank 1 True; request_counts: rank 0 (1, 4), "
            in str(found)
        )


@pytest.mark.parametrize(
    ("option", "values"),
    [("device", ("cpu", "auto")), ("backend", ("torch", "auto")), ("check_lockstep", (False, True))],
)
def test_ranks_that_would_ask_each_other_for_other_things_are_refused(
    root: Path, option: str, values: tuple[object, object]
) -> None:
    """TP-5: before the first of them asks."""
    directory = engines(root).path

    def opened(communicator: Communicator) -> None:
        options: dict[str, Any] = {"device": "cpu", option: values[communicator.rank]}
        open_decoder(directory, communicator=communicator, **options)

    for found in outcomes(2, opened, timeout_s=20):
        assert isinstance(found, LaunchError)
        assert f"{option}: rank 0 {values[0]}, rank 1 {values[1]}" in str(found)


@pytest.mark.parametrize("counts", [(0,), (2, -1), (1, 1000)])
def test_request_counts_that_no_batch_has_are_refused(root: Path, counts: tuple[int, ...]) -> None:
    directory = engines(root, 1)
    wrong = [count for count in counts if not 1 <= count <= directory.build.max_batch_size]
    said = (
        f"--request-counts has {wrong[0]}, expected counts from 1 to {directory.build.max_batch_size}, these engines'"
    )
    with pytest.raises(RequestError, match=said):
        open_decoder(directory.path, device="cpu", request_counts=counts)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    """The library raises no class of its own."""
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(
        RequestError, match=r"tokenizer\.json: not a tokenizer \(.*\); copy it again from the checkpoint"
    ):
        detokenizer(tmp_path)


def test_engines_have_the_mailbox_or_nothing(root: Path, gpus: dict[str, Any]) -> None:
    """Their boundaries are compiled in: no other way is left where the mailbox is too small or missing."""

    def opened(directory: EngineDir) -> list[Platform | Exception]:
        return outcomes(2, lambda c: open_engine_platform(directory, c, GPU, peer_timeout_s=1), timeout_s=20)

    assert all(isinstance(f, Platform) and f.mailbox for f in opened(engines(root, max_batch_size=42)))
    for found in opened(engines(root, max_batch_size=43)):
        assert isinstance(found, LaunchError)
        assert "steps of 43 requests have 258 rows, boundaries inside engines of several ranks take 256" in str(found)
    gpus["reason"] = "cudaIpcOpenMemHandle failed"
    assert all(isinstance(found, MailboxError) for found in opened(engines(root, max_batch_size=42)))
