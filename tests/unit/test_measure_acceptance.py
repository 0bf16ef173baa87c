"""The arithmetic of examples/measure_acceptance.py, what it records, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.verification import BlockVerification, StandardRejection
from dspark_trt.runtime_py.watchdog import Progress

from tests.benchmarks import render
from tests.example_scripts import load_example
from tests.fakes import Tables, table_decoder

measure_acceptance = load_example("measure_acceptance")
Estimate = measure_acceptance.Estimate


def test_shares_by_hand() -> None:
    """Steps that kept 2, 0, 1, 3 and 1 of three drafts; nobody got past a draft that none reached."""
    steps = [(0, 2), (1, 0), (0, 1), (1, 3), (3, 1)]
    found = measure_acceptance.estimates(steps, 4, 200)
    assert found["tokens_per_step"].mean == pytest.approx(1 + 7 / 5)
    assert [e.mean for e in found["kept"]] == pytest.approx([4 / 5, 2 / 5, 1 / 5, 0])
    assert [e and e.mean for e in found["kept_given_before"]] == pytest.approx([4 / 5, 2 / 4, 1 / 2, 0])
    nothing = measure_acceptance.estimates([(0, 0), (1, 0)], 2, 50)
    assert nothing["tokens_per_step"] == Estimate(1.0, 1.0, 1.0)
    assert nothing["kept_given_before"] == [Estimate(0.0, 0.0, 0.0), None]


def test_intervals_are_of_prompts() -> None:
    """100 prompts that always keep one draft or always none: the mean's standard error is 0.05, however many steps
    each has; one prompt alone says nothing about others."""
    for length in (1, 30):
        steps = [(prompt, prompt % 2) for prompt in range(100) for _ in range(length)]
        share = measure_acceptance.estimates(steps, 1, 4000)["kept"][0]
        # Half of a thousandth of 4000 samples lie after each end, so an end is off by 0.003.
        assert (share.mean, share.low, share.high) == pytest.approx((0.5, 0.402, 0.598), abs=0.011)
    alone = measure_acceptance.estimates([(7, 1), (7, 0)], 1, 100)["kept"][0]
    assert alone == Estimate(0.5, 0.5, 0.5)


@pytest.mark.parametrize("method", [StandardRejection(), BlockVerification()])
def test_records_every_step(method: object) -> None:
    """As many as the statistics count, with the request that they belong to and the confidence of their drafts;
    prefills are no steps."""
    tables = Tables.random(7, 4, seed=2)
    recorder, confidences = measure_acceptance.Recorder(method), measure_acceptance.Confidences()
    loop = table_decoder(tables, slots=3, verifier=recorder, scheduler=confidences)
    done, stats = loop.generate(
        [[i] for i in range(5)],
        [SamplingParams(max_tokens=20 + 7 * i, temperature=0.4 * i, seed=i) for i in range(5)],
    )
    assert len(recorder.steps) == stats.steps
    assert [sum(n > i for _, n in recorder.steps) for i in range(4)] == stats.accepted_per_position
    assert stats.proposed_per_position == [stats.steps] * 4
    for i, completion in enumerate(done):
        emitted = 1 + sum(1 + n for index, n in recorder.steps if index == i)
        assert len(completion.token_ids) <= emitted < len(completion.token_ids) + 5
    rows = torch.cat(confidences.rows)
    assert rows.shape == (stats.steps, 4)
    # The confidence tables' rows are of the token before: of a slot 0, the anchor, which the first step has of each.
    first = [next(k for k, (index, _) in enumerate(recorder.steps) if index == i) for i in range(5)]
    for i, completion in enumerate(done):
        assert rows[first[i], 0] == tables.confidence[0, completion.token_ids[0]]


def test_decoders_are_opened_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, object]] = []

    def from_dir(directory: Path, **given: object) -> object:
        opened.append({"directory": directory, **given})
        raise InterruptedError

    monkeypatch.setattr(measure_acceptance.Decoder, "from_dir", from_dir)
    options = measure_acceptance.Options(engine_dir=Path("e"), output=Path("o"), backend="torch", device="cpu")
    progress = Progress()
    with pytest.raises(InterruptedError):
        next(measure_acceptance.measure(options, [[1]], {}, SingleProcess(), progress))
    wanted = {"directory": Path("e"), "backend": "torch", "device": "cpu", "progress": progress}
    assert {name: opened[0][name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bootstrap_samples": 0}, "--bootstrap-samples is 0, expected at least 1; pass more"),
        ({"bootstrap_samples": -5}, "--bootstrap-samples is -5, expected at least 1"),
        (
            {"bootstrap_samples": 99999999999},
            "--bootstrap-samples is 99999999999, expected at most 100000, which are in",
        ),
        ({"max_output_len": 1}, "--max-output-len is 1, expected at least 2, as the first token comes without drafts"),
    ],
)
def test_nothing_to_measure(given: dict[str, Any], message: str) -> None:
    (problem,) = measure_acceptance.Options(engine_dir=Path("e"), output=Path("o"), **given).problems()
    assert problem.startswith(message)


def test_the_least_that_can_be_measured() -> None:
    least = {"temperatures": (0.0,), "methods": ("block",), "bootstrap_samples": 1, "max_output_len": 2}
    for fitting in (least, {"bootstrap_samples": 100000}):
        assert measure_acceptance.Options(engine_dir=Path("e"), output=Path("o"), **fitting).problems() == []


def example_rows() -> list[dict[str, object]]:
    share = Estimate(0.5, 0.4, 0.625)
    row = {"steps": 3, "tokens_per_step": Estimate(2.0, 1.5, 2.25), "kept": [share, Estimate(0.0, 0.0, 0.0)]}
    row |= {"kept_given_before": [share, None], "confidence_temperatures": [1.0, 1.0]}
    return [{"temperature": t, "method": m, **row} for t, m in ((0.0, "greedy"), (0.7, "standard"), (0.7, "block"))]


def test_tables_and_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = measure_acceptance.acceptance_table(example_rows(), "kept_given_before")
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["0", "0.7", "0.7"] and cells[1] == ["greedy", "standard", "block"]
    assert cells[2:] == [["2.00 (1.50-2.25)"] * 3, ["50 (40-62)"] * 3, ["-"] * 3]
    figure = measure_acceptance.draw(example_rows(), measure_acceptance.import_pyplot())
    left, right = figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["standard", "block"]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["temperature 0", "temperature 0.7"]
    assert [line.get_linestyle() for line in right.lines] == ["-", "-", "--"]


def test_the_readmes_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the newest file; only sections whose markers a file has are replaced."""
    for date, mean in (("2026-11-29", 2.0), ("2026-11-28", 9.0)):
        rows = json.loads(json.dumps(example_rows(), default=measure_acceptance.dataclasses.asdict))
        rows[0]["tokens_per_step"]["mean"] = mean
        (tmp_path / f"{date}-acceptance.json").write_text(json.dumps({"acceptance": rows}))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- acceptance: begin -->\nold\n<!-- acceptance: end -->\nbehind\n")
    monkeypatch.setattr("sys.argv", ["render.py", str(readme)])
    render.main()
    lines = readme.read_text().splitlines()
    assert lines[:2] == ["before", "<!-- acceptance: begin -->"] and lines[-2:] == [
        "<!-- acceptance: end -->",
        "behind",
    ]
    assert lines[2:5] == [
        "| temperature | method | tokens per step | 1 | 2 |",
        "|---|---|---|---|---|",
        "| 0 | greedy | 2.00 (1.50 to 2.25) | 50 (50) | 0 |",
    ]
    assert len(lines) == 9
