"""Resuming: which rows a run takes, by what the store really has, and that it ends as an undisturbed run would."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tasks.dataset.plan import load_plan, save_plan
from tasks.dataset.rows import read_planned
from tasks.errors import ExtractionError, LostLockError, OutputError, StoreError, WriteError
from tasks.extraction import engine as engine_module
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.preflight import describe, open_output
from tasks.server.launch import AttachedServer
from tasks.store.lock import WriterLock
from tasks.store.record import read_records, record_path, write_record
from tests.unit.helpers import VOCAB, FakeSGLang, status
from tests.unit.jobs import ROWS, Job, make_job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(engine_module, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(engine_module, "LONGEST_WAIT", 0.002)
    with FakeSGLang(tmp_path / "staging") as fake:
        yield make_job(tmp_path, fake, str(tmp_path / "output"))


REFUSED, BUSY = [status(400, "too long")], [status(503, "busy")] * 2


def test_a_run_without_faults_does_every_row_once_and_resumes_with_nothing_to_do(job: Job) -> None:
    job.run()
    assert job.tried == list(range(ROWS))
    assert job.verify().rows == {"done": ROWS, "truncated": 0, "skipped": 0, "failed": 0}
    job.run()
    assert job.tried == []


def test_a_resumed_run_tries_what_may_heal_and_not_what_the_server_refused(job: Job) -> None:
    job.run({0: REFUSED, 3: BUSY})
    failed = {row.row: row.may_heal for record in read_records(job.store) for row in record.failed}
    assert failed == {0: False, 3: True}
    job.run()
    assert job.tried == [3]
    job.run()
    assert job.tried == []


def test_retry_failed_takes_the_rows_that_failed_and_not_those_never_tried(job: Job) -> None:
    job.run({0: REFUSED, 3: BUSY}, batches=2)  # rows 4 and 5 are not tried
    job.run(only_failed=True)
    assert job.tried == [0, 3]
    assert job.preflight().books.final == frozenset()
    with pytest.raises(ExtractionError, match=r"4 rows are done, 0 of 6 rows failed .*, 2 were not extracted yet"):
        job.verify()
    job.run()
    assert job.tried == [4, 5]
    assert job.verify().rows["done"] == ROWS


def test_the_last_try_says_whether_a_row_may_heal(job: Job) -> None:
    job.run({0: BUSY, 1: REFUSED})
    job.run({0: REFUSED, 1: BUSY}, only_failed=True)
    books = job.preflight().books
    assert (books.states[:2], books.final) == (["failed", "failed"], {0})
    assert "refused" in books.reason(0)
    assert "HTTP 503" in books.reason(1)
    job.run()
    assert job.tried == [1]


def test_retrying_where_nothing_failed_is_refused_unless_all_is_done(job: Job) -> None:
    job.run(batches=2)
    with pytest.raises(
        OutputError, match=r"No row of .* failed.*; 2 rows were not extracted yet: `python -m flows ext"
    ):
        job.preflight(only_failed=True)
    job.run()
    assert job.preflight(only_failed=True).missing == {}


def test_retrying_before_anything_was_extracted_is_refused(job: Job) -> None:
    with pytest.raises(OutputError, match=r"No row of .* failed.*; 6 rows were not extracted yet"):
        job.preflight(only_failed=True)
    assert not job.store.root.exists()


def test_what_failed_is_said_with_the_command_that_tries_again(job: Job) -> None:
    job.run({0: REFUSED, 3: BUSY})
    lines = dict(describe(job.preflight()))
    assert lines["resumes"] == "4 rows are there already, 1 are to do"
    assert lines["failed"].startswith(
        "2 rows in earlier runs: 1 may heal, 1 would fail again; `python -m flows retry-f"
    )
    with pytest.raises(ExtractionError) as refused:
        job.verify()
    message = str(refused.value)
    assert "4 rows are done, 2 of 6 rows failed (extraction.max_failed_share allows 0.00%), 0 were not" in message
    assert "row 0: the server refused the row" in message
    assert "Run the same command again: it tries just these." in message
    assert "1 rows would fail in the same way, so only `python -m flows retry-failed CONFIG.yaml` tries them" in message


def test_a_run_that_can_do_no_more_by_itself_is_not_told_to_start_again(job: Job) -> None:
    job.run({0: REFUSED})
    with pytest.raises(ExtractionError) as refused:
        job.verify()
    assert "Run the same command again" not in str(refused.value)


def test_the_ledger_says_which_failed_rows_may_heal(job: Job) -> None:
    job.run({0: REFUSED, 3: BUSY})
    job.verify(max_failed_share=0.5)
    ledger = pq.read_table(job.store.ledger).to_pydict()
    assert ledger["state"] == ["failed", "done", "done", "failed", "done", "done"]
    assert ledger["may_heal"] == [False, None, None, True, None, None]


def test_not_one_row_done_is_a_failure_whatever_may_fail(job: Job) -> None:
    job.run(dict.fromkeys(range(ROWS), REFUSED))
    with pytest.raises(ExtractionError, match="0 rows are done, 6 of 6 rows failed"):
        job.verify(max_failed_share=1.0)


def damage_shard(job: Job) -> None:
    path = job.store.shard(1, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_shard_is_seen_and_extracted_anew_by_a_deep_resume_only(job: Job) -> None:
    job.run()
    contents = job.contents()
    damage_shard(job)
    job.run()
    assert job.tried == []
    assert job.contents() != contents
    damaged = dict(describe(job.preflight(deep=True)))["damaged"]
    assert damaged == (
        "1 shards or records, to be extracted again: 000001.safetensors is not what its commit record says"
    )
    job.run(deep=True)
    assert job.tried == [2, 3]
    assert job.contents() == contents
    assert job.verify().rows["done"] == ROWS


def lose_shard(job: Job) -> None:
    job.store.shard(1, 0).unlink()


def lose_record(job: Job) -> None:
    record_path(job.store, 1, 0).unlink()


def cut_record(job: Job) -> None:
    path = record_path(job.store, 1, 0)
    path.write_bytes(path.read_bytes()[:200])


def cut_shard(job: Job) -> None:
    path = job.store.shard(1, 0)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [lose_shard, lose_record, cut_record, cut_shard])
def test_a_plain_resume_mends_what_sizes_and_records_show(job: Job, damage: Any) -> None:
    job.run()
    contents = job.contents()
    damage(job)
    job.run()
    assert job.tried == [2, 3]
    assert job.contents() == contents
    assert job.verify().rows["done"] == ROWS


def test_a_shard_that_lost_its_record_and_whose_rows_now_fail_leaves_no_file(job: Job) -> None:
    job.run()
    lose_record(job)
    job.run({2: REFUSED, 3: REFUSED})
    assert sorted(job.contents()) == ["000000.safetensors", "000002.safetensors"]


def test_a_record_of_another_extraction_stops_the_run(job: Job) -> None:
    job.run()
    path = record_path(job.store, 1, 0)
    path.write_text(path.read_text().replace(job.preflight().fingerprint, "0" * 64))
    with pytest.raises(StoreError, match=r"000001\.json belongs to another extraction"):
        job.preflight()
    assert path.exists()


def test_records_that_contradict_each_other_stop_the_run(job: Job) -> None:
    job.run({0: BUSY})
    job.run()
    first, second = read_records(job.store)[:2]
    write_record(job.store, replace(first, rows=[*first.rows, second.rows[0]]))
    with pytest.raises(StoreError, match=r"row 0 is in the books twice.*Delete the commit records"):
        job.preflight()


def test_a_row_listed_twice_by_one_record_is_a_contradiction(job: Job) -> None:
    job.run({0: BUSY})
    record = read_records(job.store)[0]
    write_record(job.store, replace(record, rows=[*record.rows, record.rows[0]]))
    with pytest.raises(StoreError, match=r"record 000000\.0 lists a row more than once"):
        job.preflight()


def test_a_failed_row_without_a_reason_is_a_contradiction(job: Job) -> None:
    job.run({0: BUSY})
    path = record_path(job.store, 0, 0)
    value = json.loads(path.read_text())
    value["failed"][0]["reason"] = ""
    path.write_text(json.dumps(value))
    with pytest.raises(StoreError, match="row 0 is failed without a reason"):
        job.preflight()


def test_a_plan_that_is_not_the_datasets_stops_the_run(job: Job) -> None:
    job.run()
    plan = load_plan(job.store.plan)
    save_plan(replace(plan, tokens=plan.tokens - 1), job.store.plan)
    with pytest.raises(StoreError, match=r"plan\.parquet is not the plan of this dataset: its column 'tokens' differs"):
        job.preflight()


def test_a_run_whose_preflight_is_older_than_another_runs_work_stops_before_it_writes(job: Job) -> None:
    job.run(batches=1)
    preflight = job.preflight()
    job.run()
    with WriterLock(job.store.lock), pytest.raises(OutputError, match=r"Another run wrote to .* Start this one again"):
        open_output(preflight)
    assert job.verify().rows["done"] == ROWS


def test_a_new_output_that_another_run_began_meanwhile_is_left_alone(job: Job) -> None:
    preflight = job.preflight()
    job.run()
    with WriterLock(job.store.lock), pytest.raises(OutputError, match="Another run wrote to"):
        open_output(preflight)
    assert job.verify().rows["done"] == ROWS


@pytest.mark.parametrize("paused", [True, False], ids=["after its last look at the lock", "before it"])
def test_a_writer_that_is_taken_over_commits_nothing(job: Job, paused: bool) -> None:
    job.run(batches=1)
    preflight = job.preflight()
    before = sorted(job.store.shards.iterdir())
    server = AttachedServer(job.fake.url, job.fake.staging)
    rows = list(read_planned(job.config.dataset.path, preflight.plan, preflight.missing[1], VOCAB))
    with (
        WriterLock(job.store.lock) as lock,
        PrefillEngine([server], preflight.captured, job.config.extraction, 1 << 20) as engine,
    ):
        if paused:
            lock.check = lambda: None  # type: ignore[method-assign]
        job.store.lock.unlink()
        with WriterLock(job.store.lock) as other:
            with pytest.raises(WriteError if paused else LostLockError):
                extract_batch(1, rows, engine, job.store, preflight.fingerprint, lock)
            assert sorted(job.store.shards.iterdir()) == before
            other.check()
