"""The report: verdict first, figures from the store, text from elsewhere escaped, long tables cut with a count."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows.__main__ import main
from tasks.errors import DrillcoreError
from tasks.report import markdown_report, markdown_table, report_path, write_report
from tasks.report.facts import gather, reasons_of, throughput_of
from tasks.store.books import CODES, NOWHERE, Books
from tasks.store.layout import fingerprint_of
from tasks.store.record import FailedRow, Record, RowRecord, read_record, write_record
from tasks.verification import verify_store
from tests.unit.helpers import SmallStore, make_store


def written(at: str, seconds: float, tokens: int) -> Record:
    row = RowRecord(0, tokens, [], [])
    return Record("f", 0, 0, "x", 1, "c", "raw", [row], [], {"at": f"2026-01-01T{at}+00:00", "seconds": seconds})


def report(small: SmallStore, max_failed_share: float = 0.0) -> str:
    try:
        verify_store(small.store, small.dataset, max_failed_share)
    except DrillcoreError:
        pass
    path = write_report(small.store)
    assert path == report_path(small.store)
    return path.read_text()


def test_the_verdict_comes_first_and_nothing_is_fetched(tmp_path: Path) -> None:
    page = report(make_store(tmp_path))
    body = page[page.index("<body>") :]
    assert body.index("Passed") < body.index("What was proved") < body.index("Lengths") < body.index("Where it comes")
    assert "6 of 7 rows are stored and every byte of them was read back and checked" in body
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)
    assert "prefers-color-scheme: dark" in page


def test_what_is_wrong_is_said_by_row_with_what_to_do(tmp_path: Path) -> None:
    small = make_store(tmp_path, lambda stored: replace(stored, mask=1 - stored.mask) if stored.row == 1 else stored)
    page = report(small)
    assert "<b>Failed</b>" in page
    assert "000000.safetensors row 1: the loss mask is not the input&#39;s" in page
    assert "extract the row again" in page
    assert page.index("What is wrong") < page.index("What was proved")


def test_an_incomplete_store_is_never_called_passed(tmp_path: Path) -> None:
    page = report(make_store(tmp_path, leave_out=(5,)))
    assert "<b>Incomplete</b>" in page
    assert "Passed" not in page[page.index("<body>") :]
    assert "not extracted yet" in page


def test_text_from_elsewhere_is_escaped(tmp_path: Path) -> None:
    small = make_store(tmp_path, leave_out=(5,))
    record = read_record(small.record_path(6))
    reason = "<script>alert(1)</script> | [link](http://x)"
    write_record(small.store, replace(record, failed=[FailedRow(5, reason)]))
    page = report(small)
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    markdown = markdown_report(small.store)
    assert markdown is not None
    assert "\\<script\\>" in markdown
    assert "[link](" not in markdown


def test_long_tables_are_cut_with_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_store(tmp_path, lambda stored: replace(stored, mask=1 - stored.mask))
    monkeypatch.setattr("tasks.report.page.SHOWN", 4)
    page = report(small)
    assert page.count('<td class="mark no">✗</td><td>0') == 4
    assert "and 2 more, in logs/verification.json" in page


def test_a_store_that_was_never_verified_has_no_report(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    assert write_report(small.store) is None
    assert markdown_report(small.store) is None
    assert gather(small.store) is None


def test_throughput_is_spread_over_the_time_that_a_batch_took() -> None:
    found = throughput_of([written("00:00:10", 10, 100), written("00:00:20", 10, 300)], bins=4)
    assert found is not None
    np.testing.assert_allclose(found.rates, [10, 10, 30, 30])
    assert (found.seconds, found.tokens, found.seams) == (20, 400, [])


def test_batches_at_work_together_add_up() -> None:
    found = throughput_of([written("00:00:10", 10, 100), written("00:00:10", 5, 100)], bins=2)
    assert found is not None
    np.testing.assert_allclose(found.rates, [10, 30])


def test_a_night_between_two_runs_is_left_out_of_the_axis() -> None:
    found = throughput_of([written("00:00:10", 10, 100), written("09:00:10", 10, 100)], bins=2)
    assert found is not None
    assert (found.seconds, found.seams) == (20, [0.5])
    np.testing.assert_allclose(found.rates, [10, 10])


def test_records_that_do_not_say_when_have_no_throughput() -> None:
    assert throughput_of([replace(written("00:00:10", 1, 1), written={})]) is None
    assert throughput_of([]) is None


def test_reasons_that_differ_in_numbers_are_one_line() -> None:
    codes = np.array([CODES[state] for state in ["failed"] * 12 + ["done", "skipped"]], dtype=np.uint8)
    reasons = {row: f"HTTP 503 after {row} s" for row in range(12)} | {13: "no input_ids"}
    found = reasons_of(Books(codes, reasons, np.full(14, NOWHERE), [], frozenset(), []))
    assert [(one.state, one.count, one.text) for one in found] == [
        ("failed", 12, "HTTP 503 after 0 s"),
        ("skipped", 1, "no input_ids"),
    ]
    assert found[0].rows == "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def configured(small: SmallStore) -> str:
    """Say in the store where its dataset is, as an extraction does."""
    value = json.loads(small.store.extraction.read_bytes())
    assert fingerprint_of(value["parts"]) == value["fingerprint"]
    value["config"] |= {"dataset": {"path": str(small.dataset)}, "extraction": {"max_failed_share": 0.0}}
    small.store.extraction.write_text(json.dumps(value))
    return str(small.store.root)


def test_the_command_writes_the_report_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = make_store(tmp_path)
    assert main(["verify", configured(small)]) == 0
    output = capsys.readouterr()
    assert f"report     {report_path(small.store)}" in output.out
    assert " read, 3 of 3 shards, " in output.err
    assert report_path(small.store).exists()


def test_the_command_prints_json_also_when_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = make_store(tmp_path, lambda stored: replace(stored, mask=1 - stored.mask) if stored.row == 1 else stored)
    root = configured(small)
    assert main(["verify", root, "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["verdict"] == "failed"
    assert [(problem["check"], problem["row"], problem["mend"]) for problem in value["problems"]] == [
        ("input", 1, "row")
    ]
    assert main(["verify", root, "--repair", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["repaired"]["rows"] == [1]
    assert "<b>Failed</b>" in report_path(small.store).read_text()


def test_json_of_an_earlier_verification_is_never_shown_for_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = make_store(tmp_path)
    root = configured(small)
    assert main(["verify", root]) == 0
    small.dataset.unlink()
    capsys.readouterr()
    assert main(["verify", root, "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_table_of_names_and_values_takes_text_from_elsewhere() -> None:
    lines = [("output", "/data/my_states | <b>"), ("rows", "8")]
    assert markdown_table(lines).splitlines() == [
        "| | |",
        "|---|---|",
        "| output | /data/my\\_states \\| \\<b\\> |",
        "| rows | 8 |",
    ]
