"""Opens an engine directory: the executor, its sessions, and the decoder over them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..builder.build_config import Kind
from ..builder.checkpoint import rank_file_name
from ..builder.config import TargetConfig
from ..builder.engine_dir import WEIGHTS, EngineDir, engine_file_name
from ..builder.model.draft import DraftModel
from ..builder.network import load_network
from ..plugins.markov_sampling import Sampler
from ..plugins.tensorrt_api import TensorRT
from .backend import Backend, choose_executor
from .boundary import FUSED_MHC_MAX_ROWS
from .communicator import Communicator, check_alike, connect
from .decoder import Decoder, Detokenize, Execution
from .device import DeviceChoice, Platform, open_engine_platform, open_platform, rank_device
from .interleaving import low_batch_problem
from .mapping import Mapping
from .requests import RequestError
from .session import Session, TorchSession
from .tensorrt_session import TensorRTSession, open_session
from .verification import Verifier
from .watchdog import Progress

logger = logging.getLogger(__name__)

LOADING_BYTES_PER_SECOND = 50e6
"""What the slowest disk that is worth waiting for reads."""


def open_decoder(
    engine_dir: Path,
    *,
    communicator: Communicator | None = None,
    speculative: bool = True,
    verifier: Verifier | None = None,
    sampler: Sampler | None = None,
    online_acceptance: bool = False,
    check_lockstep: bool = False,
    device: DeviceChoice = "auto",
    backend: Backend = "auto",
    request_counts: Sequence[int] | None = None,
    side_stream: bool = True,
    peer_timeout_s: float = 10.0,
    progress: Progress | None = None,
) -> Decoder:
    """A decoder over an engine directory, executed by its engines or by the torch sessions of its weights.

    Args:
        sampler: chooses tokens in drafting and in verification, in place of the keyed Gumbel noise.
        online_acceptance: a scheduler will estimate acceptance while decoding, which keeps the draft's sampling whole.
        check_lockstep: compare what ranks decide at every step of the host, not only take rank 0's; steps on devices
            always do so.
        device: auto is a GPU wherever there is one for every rank.
        backend: auto is TensorRT where the engines run on every rank.
        request_counts: request counts whose steps are captured on a GPU; None for powers of two up to the
            largest batch.
        side_stream: compute the mHC coefficients beside attention and experts (GPU).
        peer_timeout_s: how long a kernel waits for another rank before the step is given up.
        progress: is told what the decoder does, such as a :class:`~.watchdog.Watchdog`.

    Raises:
        LaunchError: the job's ranks are not those the engines were built for, ask for steps of other kinds, a rank has
            no GPU of its own, or the largest step of engines of several ranks does not fit the mailbox.
        MappingError: ``communicator`` was given and has another number of ranks than the engines.
        EngineDirError: the directory is incomplete or of another version.
        TensorRTUnavailableError: TensorRT was asked for and can't run the engines.
        EngineLoadError, MailboxError: an engine can't be loaded, or the GPUs of its ranks can't reach each other.
        CheckpointError: the weights can't be loaded.
        KernelUnavailableError: there is a GPU and no kernel library for it, or it lacks plugins of the engines.
        StockError: the ranks' GPUs need NCCL and can't have it.
        BoundaryError: the ranks' engines have different activation types.
        GraphError, EngineRunError: a step can't be captured, or TensorRT refused it.
        RequestError: there is no target, or a sampler for greedy drafts.
    """
    directory = EngineDir.open(engine_dir)
    communicator = communicator or connect(directory.tp_size)
    mapping = Mapping.from_dict({"world_size": communicator.size, "rank": communicator.rank, **directory.mapping})
    target_config = _check_request(directory, sampler if speculative else None, request_counts or ())
    verifier = verifier or Verifier()
    if sampler:
        verifier = dataclasses.replace(verifier, sampler=sampler)
    told = progress or Progress()
    with told.operation("agreement of the ranks on what executes"):
        check_alike(
            communicator,
            speculative=speculative,
            request_counts=request_counts and tuple(request_counts),
            device=device,
            backend=backend,
            check_lockstep=check_lockstep,
            online_acceptance=online_acceptance,
            verification=type(verifier.method).__name__,
        )
        place = rank_device(communicator, device)
        api = choose_executor(directory, communicator, place, backend).api
    if sampler and api:
        raise RequestError(f"{engine_dir}: engines choose drafts themselves and ask no sampler; pass --backend torch")
    with told.operation("connection of the ranks' GPUs"):
        platform = _open_platform(directory, communicator, place, api, side_stream, peer_timeout_s)
    rows = directory.draft.block_size + 1
    if communicator.size > 1 and communicator.rank == 0 and (problem := low_batch_problem(request_counts or (), rows)):
        logger.warning("%s", problem)

    def session(kind: Kind) -> Session:
        if api:
            return _open_engine(directory, kind, mapping, api, platform, told)
        loaded = _load_session(directory, kind, mapping, communicator, platform, told, online_acceptance)
        if sampler and isinstance(loaded.network.model, DraftModel):
            loaded.network.model.sampler = sampler
        return loaded

    target, draft = session("target"), session("draft") if speculative else None
    mailbox = platform.mailbox
    decoder = Decoder(
        target,
        draft,
        target_config=target_config,
        draft_config=directory.draft,
        build=directory.build,
        communicator=communicator,
        verifier=verifier,
        detokenize=detokenizer(directory.path),
        check_lockstep=check_lockstep,
        execution=Execution(
            place,
            torch.cuda.Stream(place) if place.type == "cuda" else None,
            request_counts=request_counts,
            fault=mailbox.fault() if mailbox else None,
            on_fault=mailbox.check if mailbox else (lambda: None),
            # Engines have no other way for boundaries than the mailbox.
            max_rows=FUSED_MHC_MAX_ROWS if mailbox and api else None,
            progress=told,
            close=platform.close,
        ),
    )
    decoder.capture()
    for opened in (target, draft):
        if isinstance(opened, TensorRTSession):
            opened.save_runtime_cache()
    return decoder


def _check_request(directory: EngineDir, drafts_sampler: Sampler | None, counts: Sequence[int]) -> TargetConfig:
    """The target's configuration, after a look at what was asked for."""
    if directory.target is None:
        raise RequestError(f"{directory.path}: holds a draft without its target; decoding needs both")
    if drafts_sampler and not directory.build.sampling:
        raise RequestError(
            f"{directory.path}: built without --sampling, its drafts are greedy and ask no sampler; build it again "
            "with --sampling, or leave the sampler out"
        )
    if bad := [count for count in counts if not 1 <= count <= directory.build.max_batch_size]:
        raise RequestError(
            f"--request-counts has {', '.join(map(str, bad))}, expected counts from 1 to "
            f"{directory.build.max_batch_size}, these engines' --max-batch-size; leave the option out for powers of two"
        )
    return directory.target


def _open_platform(
    directory: EngineDir,
    communicator: Communicator,
    place: torch.device,
    api: TensorRT | None,
    side_stream: bool,
    peer_timeout_s: float,
) -> Platform:
    """What the sessions compute with: engines have their own way of running operations, and no other than the mailbox
    between ranks."""
    if place.type == "cpu":
        return Platform(place)
    if api:
        return open_engine_platform(directory, communicator, place, peer_timeout_s=peer_timeout_s)
    return open_platform(directory, communicator, place, side_stream=side_stream, peer_timeout_s=peer_timeout_s)


def _open_engine(
    directory: EngineDir, kind: Kind, mapping: Mapping, api: TensorRT, platform: Platform, told: Progress
) -> TensorRTSession:
    rank, ranks, mailbox = mapping.tp_rank, mapping.world_size, platform.mailbox_tensor
    extra_s = loading_seconds(directory.path / engine_file_name(kind, rank))
    with told.operation(f"loading of the {kind}'s engine", extra_s=extra_s):
        return open_session(directory, kind, rank, api, world_size=ranks, mailbox=mailbox)


def _load_session(
    directory: EngineDir,
    kind: Kind,
    mapping: Mapping,
    communicator: Communicator,
    platform: Platform,
    told: Progress,
    online_acceptance: bool,
) -> TorchSession:
    shards = directory.path / WEIGHTS
    file = shards / rank_file_name(mapping.tp_rank)
    # One file has both networks; the target, which is loaded first, has it checked.
    options = {"online_acceptance": online_acceptance, "check_bytes": kind == "target"}
    with told.operation(f"loading of the {kind}'s weights", extra_s=loading_seconds(file)):
        network = load_network(kind, shards, mapping.tp_rank, directory.build, **options).to(platform.device)
    mailbox = platform.mailbox_tensor
    return TorchSession(network, communicator, mailbox=mailbox, scope=platform.scope, group=platform.group)


def loading_seconds(file: Path) -> float:
    """How much longer than other operations the loading of a file may take."""
    return file.stat().st_size / LOADING_BYTES_PER_SECOND


def read_tokenizer(file: Path, remedy: str) -> Tokenizer:
    """The tokenizer in ``file``; RequestError, which ends with ``remedy``, if there is none in it."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        raise RequestError(f"{file}: not a tokenizer ({' '.join(str(error).split())}); {remedy}") from None


def detokenizer(directory: Path) -> Detokenize | None:
    """What turns output into text, if the directory has a tokenizer."""
    if not (file := directory / "tokenizer.json").is_file():
        return None
    tokenizer = read_tokenizer(file, "copy it again from the checkpoint")
    return lambda ids: str(tokenizer.decode(list(ids)))
