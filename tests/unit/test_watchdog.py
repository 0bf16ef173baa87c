"""A rank that gets nowhere says where it stands and ends the job; one that works is left alone."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.watchdog import Watchdog, WatchdogError

from tests.example_scripts import load_example


class Job:
    """Stands in for the other ranks: notes when and with what status the job was ended."""

    def __init__(self) -> None:
        self.output, self.ended = io.StringIO(), threading.Event()
        self.status: int | None = None

    def abort(self, status: int) -> None:
        self.status = status
        self.ended.set()

    def watchdog(self, timeout_s: float) -> Watchdog:
        return Watchdog(3, self.abort, timeout_s=timeout_s, grace_s=0.05, output=self.output)


def test_a_silent_rank_is_named_with_what_it_enqueued_last() -> None:
    """TP-11."""
    job = Job()
    with job.watchdog(0.1) as watchdog, watchdog.operation("step 7 of 2 requests"):
        watchdog.enqueued("draft of 2 requests")
        assert job.ended.wait(10)
    assert job.status == 1
    said = job.output.getvalue()
    started = r"rank 3: step 7 of 2 requests has not gone on for \d+ s; last enqueued: draft of 2 requests\."
    assert re.match(started, said)
    assert said.count("\n") == 1


def test_work_in_time_is_left_alone() -> None:
    job = Job()
    with job.watchdog(2) as watchdog:
        for step in range(8):
            with watchdog.operation(f"step {step}"):
                time.sleep(0.3)
        time.sleep(2.3)  # between operations a rank may wait for its user
    assert job.status is None
    assert job.output.getvalue() == ""


def test_an_operation_may_take_longer() -> None:
    job = Job()
    with job.watchdog(0.05) as watchdog, watchdog.operation("loading", extra_s=60):
        time.sleep(0.3)
    assert job.status is None


def test_the_innermost_operation_counts_and_the_outer_goes_on() -> None:
    job = Job()
    with job.watchdog(1) as watchdog, watchdog.operation("step 1", extra_s=0.5):
        for _ in range(3):
            with watchdog.operation("capture", extra_s=60):
                time.sleep(0.8)
        time.sleep(1.2)
        assert job.status is None
        with watchdog.operation("capture"):
            assert job.ended.wait(10)
    assert "rank 3: capture has not gone on for 1 s" in job.output.getvalue()


def test_an_operation_that_fails_is_over() -> None:
    job = Job()
    with job.watchdog(1) as watchdog:
        with pytest.raises(ValueError, match="this step"), watchdog.operation("step 1"):
            watchdog.enqueued("its target")
            raise ValueError("this step")
        time.sleep(1.3)
    assert job.status is None
    assert watchdog.failed_in == "step 1; last enqueued: its target"


def test_an_error_that_was_dealt_with_is_no_place_of_a_later_one() -> None:
    with Job().watchdog(10) as watchdog:
        with pytest.raises(ValueError, match="prompt"), watchdog.operation("comparison of prompts"):
            raise ValueError("prompt 3 is empty")
        with (
            pytest.raises(ValueError, match="step"),
            watchdog.operation("step 7"),
            watchdog.operation("its draft"),
        ):
            try:
                raise ValueError("this step")
            finally:
                with watchdog.operation("cleaning up"):  # behind an error that is under way
                    pass
    assert watchdog.failed_in == "its draft; last enqueued: cleaning up"


def test_a_time_beyond_what_threads_can_wait_is_one_without_end() -> None:
    """It would end the watchdog's thread with an error of its own, and the job would go on unguarded."""
    job = Job()
    with job.watchdog(1e300) as watchdog, watchdog.operation("step 1"):
        time.sleep(0.2)
        assert watchdog._thread.is_alive()
    assert job.status is None


def test_a_time_that_can_not_pass_is_refused() -> None:
    with pytest.raises(WatchdogError, match="timeout is 0 s, expected more than 0"):
        Job().watchdog(0)


def test_examples_watch_for_as_long_as_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Rank(Job, SingleProcess):
        """One whose job can be ended."""

    rank = Rank()
    with load_example("_common").watched(rank, timeout_s=0.1, debug=False) as progress, progress.operation("a step"):
        assert rank.ended.wait(30)
    assert rank.status == 1 and "rank 0: a step has not gone on for 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_examples_refuse_times_that_never_come(seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    rank = type("Rank", (Job, SingleProcess), {})()
    # Nothing is yielded; a job would have ended there.
    with (
        pytest.raises(RuntimeError, match="didn't yield"),
        load_example("_common").watched(rank, timeout_s=seconds, debug=False),
    ):
        pass
    assert rank.status == 2 and f"RequestError: --timeout is {seconds}, expected" in capsys.readouterr().err
