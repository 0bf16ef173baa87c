"""Commands that are told to stop: Ctrl-C, or SIGTERM as batch systems send it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from dspark_trt.builder.checkpoint import convert_checkpoint
from dspark_trt.builder.interrupts import Interrupted, exit_status, raised_interrupts

from tests.released import tiny_config, write_checkpoint

pytestmark = pytest.mark.timeout(120)

AS_FROM_A_TERMINAL = """
import signal
# What runs these tests may ignore signals, as nohup and shells do for jobs in the background, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
SLOW_CONVERSION = """
import sys, time
from dspark_trt.builder import cli
write = cli.write_shards
def slowly(plan, output, on_progress):
    def wait(done):
        on_progress(done)
        print("under way", flush=True)
        time.sleep(0.2)
    write(plan, output, wait)
cli.write_shards = slowly
sys.exit(cli.convert())
"""
BUILD = "import sys; from dspark_trt.builder import cli; sys.exit(cli.build())"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interrupts") / "released"
    write_checkpoint(path, tiny_config("v4.1"))
    return path


def stop(program: str, *options: str | Path, ready: Callable[[psutil.Process], bool], number: int) -> tuple[int, str]:
    """Exit status and errors of a command that gets a signal once it is ``ready``; nothing of it must live on."""
    command = [sys.executable, "-c", AS_FROM_A_TERMINAL + program, *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    found = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while not ready(found):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the command did not get that far"
            time.sleep(0.05)
        children = found.children(recursive=True)
        process.send_signal(number)
        # What was under way, or would follow, takes longer than that.
        _, errors = process.communicate(timeout=10)
        assert not psutil.wait_procs(children, timeout=5)[1]
    finally:
        for one in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    return process.returncode, errors


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
    ids=["ctrl-c", "sigterm", "sighup"],
)
def test_a_conversion_that_is_stopped_leaves_nothing(released: Path, tmp_path: Path, number: int, name: str) -> None:
    status, errors = stop(
        SLOW_CONVERSION,
        *("--checkpoint", released, "--output", tmp_path / "shards"),
        ready=lambda _: bool(list(tmp_path.glob(".shards.partial-*/*"))),
        number=number,
    )
    assert (status, errors) == (128 + number, f"error: interrupted ({name}); nothing was written\n")
    assert left(tmp_path) == []


def test_workers_end_with_a_build_that_is_stopped(released: Path, tmp_path: Path) -> None:
    """Each is in a call of a compiler, which takes long and can't be asked to stop."""
    pytest.importorskip("tensorrt_rtx")
    convert_checkpoint(released, tmp_path / "shards", tp_size=2)
    status, errors = stop(
        BUILD,
        *("--checkpoint", tmp_path / "shards", "--output", tmp_path / "engines", "--workers", "2"),
        *("--product", "tensorrt_rtx", "--log-level", "error"),
        # Plus the process that watches over the workers' resources.
        ready=lambda process: len(process.children(recursive=True)) >= 3,
        number=signal.SIGTERM,
    )
    assert status == 128 + signal.SIGTERM, errors
    assert errors == "error: interrupted (SIGTERM); nothing was written\n"
    assert left(tmp_path) == ["shards"]


def test_a_second_signal_ends_the_process_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with raised_interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before
    assert exit_status(caught.value) == 143 and exit_status(KeyboardInterrupt()) == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_ignored_signal_stays_ignored() -> None:
    """nohup: the terminal goes, the command goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raised_interrupts():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_threads_leave_signals_alone() -> None:
    failures: list[Exception] = []

    def run() -> None:
        try:
            with raised_interrupts():
                pass
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
