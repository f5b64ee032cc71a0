"""Extractions into a bucket through the whole core, resumed, damaged, repaired, read back and recorded."""

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tasks.config import LineageConfig
from tasks.dataset.rows import read_planned
from tasks.errors import OutputError, SpaceError, StoreError, VerificationError, WriteError
from tasks.extraction import engine as engine_module
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.lineage.client import STATES_URI
from tasks.lineage.lookup import lineage_of_extraction
from tasks.lineage.record import record_extraction
from tasks.lineage.sources import StoreSource
from tasks.preflight import describe, open_output
from tasks.report import write_report
from tasks.server.launch import AttachedServer
from tasks.storage import S3Path
from tasks.storage import bucket as bucket_module
from tasks.storage.bucket import Credentials
from tasks.store.bucket_lock import spool_folder, writer_lock
from tasks.store.manifest import check_contents
from tasks.store.record import Record, read_records, record_path
from tasks.store.tensors import open_shard
from tasks.verification import verify_store
from tests.integration.faulty_proxy import Fault, FaultyProxy, spoiling
from tests.integration.seaweed import KEY, SECRET, Seaweed
from tests.unit.helpers import VOCAB, FakeSGLang, status, wait_for
from tests.unit.jobs import ROWS, Job, make_job

KEYS = Credentials(KEY, SECRET)


@dataclass
class Pair:
    """The same extraction into a bucket and into a directory."""

    remote: Job
    local: Job


@pytest.fixture
def pair(s3: Seaweed, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path / "home"))
    for module in (engine_module, bucket_module):
        monkeypatch.setattr(module, "FIRST_WAIT", 0.01)
        monkeypatch.setattr(module, "LONGEST_WAIT", 0.1)
    monkeypatch.setattr(bucket_module, "PATIENCE", 3.0)
    with FakeSGLang(tmp_path / "staging") as fake:
        remote = make_job(tmp_path, fake, s3.place(), s3={"endpoint_url": proxy.url})
        remote.credentials = lambda: KEYS
        yield Pair(remote, make_job(tmp_path, fake, str(tmp_path / "output")))


def place(job: Job) -> S3Path:
    root = job.store.root
    assert isinstance(root, S3Path)
    return root


def shard_of(job: Job, batch: int) -> S3Path:
    (record,) = [record for record in read_records(job.store) if record.batch == batch]
    path = job.store.shards / str(record.file)
    assert isinstance(path, S3Path)
    return path


def contents(job: Job) -> dict[str, dict[str, list[Any]]]:
    """The tensors of each record's shard, by the record's batch and part: rows come into a shard in any order."""
    found = {}
    for record in read_records(job.store):
        tensors = load((job.store.shards / str(record.file)).read_bytes())
        found[f"{record.batch}.{record.part}"] = {name: tensor.tolist() for name, tensor in sorted(tensors.items())}
    return found


def without_writer(record: Record) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in ("written", "file")}


def test_a_bucket_holds_what_a_directory_does(pair: Pair) -> None:
    for job in (pair.remote, pair.local):
        one_row = job.config.output.model_copy(update={"shard_bytes": 1})
        job.config = job.config.model_copy(update={"output": one_row})
        job.run()
        assert job.tried == list(range(ROWS))
        assert job.verify().rows["done"] == ROWS
        assert write_report(job.store) is not None
    ours, theirs = read_records(pair.remote.store), read_records(pair.local.store)
    assert len(ours) == ROWS
    for our, their in zip(ours, theirs, strict=True):  # every byte, also of the header
        remote, local = pair.remote.store.shards / str(our.file), pair.local.store.shards / str(their.file)
        assert remote.read_bytes() == local.read_bytes()
    assert list(map(without_writer, ours)) == list(map(without_writer, theirs))
    names = {path.name for path in place(pair.remote).iterdir()} - {"lock.json"}
    # Readers' index is kept beside records that lie on a disk only.
    assert names == {path.name for path in pair.local.store.root.iterdir()} - {"index.safetensors"}
    for name in ("plan.parquet", "ledger.parquet"):
        assert len((place(pair.remote) / name).read_bytes()) > 0
    pair.remote.run()
    assert pair.remote.tried == []
    spool = spool_folder(place(pair.remote))
    assert list(spool.iterdir()) == []


def test_a_copy_of_a_bucket_is_a_store_too(pair: Pair, tmp_path: Path) -> None:
    """As `aws s3 sync` makes it."""
    pair.remote.run()
    verified, root = pair.remote.verify(), place(pair.remote)
    for found in root.bucket.list(f"{root.key}/"):
        target = tmp_path / "copy" / found["Key"].removeprefix(f"{root.key}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(root.bucket.read(found["Key"])[0])
    copy = type(pair.local.store)(tmp_path / "copy")
    assert check_contents(copy, deep=True) == check_contents(pair.remote.store, deep=True)
    assert verify_store(copy, pair.local.config.dataset.path, 0.0).digest == verified.digest


def test_what_a_run_needs_of_a_full_bucket_is_read_in_a_few_requests(pair: Pair, proxy: FaultyProxy) -> None:
    pair.remote.run()
    pair.remote.verify()
    proxy.requests.clear()
    pair.remote.preflight()
    assert proxy.seen("GET .*shards/.*json") == 3  # each record once
    assert proxy.seen("safetensors") == 0


def test_a_row_that_failed_is_tried_again_in_a_part_of_its_own(pair: Pair) -> None:
    pair.remote.run({3: [status(503, "busy")] * 2})
    pair.remote.run()
    assert pair.remote.tried == [3]
    assert sorted(contents(pair.remote)) == ["0.0", "1.0", "1.1", "2.0"]
    assert pair.remote.verify().rows["done"] == ROWS


def cut_shard(job: Job) -> None:
    path = shard_of(job, 1)
    path.write_bytes(path.read_bytes()[:-1])


def lose_shard(job: Job) -> None:
    shard_of(job, 1).unlink()


def lose_record(job: Job) -> None:
    record_path(job.store, 1, 0).unlink()


def cut_record(job: Job) -> None:
    path = record_path(job.store, 1, 0)
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize("damage", [cut_shard, lose_shard, lose_record, cut_record])
def test_a_plain_resume_mends_what_a_listing_and_records_show(pair: Pair, damage: Any) -> None:
    job = pair.remote
    job.run()
    before = contents(job)
    damage(job)
    job.run()
    assert job.tried == [2, 3]
    assert contents(job) == before
    assert len(list(job.store.shards.glob("*.safetensors"))) == 3
    assert job.verify().rows["done"] == ROWS


def test_a_deep_resume_finds_a_byte_that_changed(pair: Pair) -> None:
    job = pair.remote
    job.run()
    before, path = contents(job), shard_of(job, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    job.run()
    assert job.tried == []
    with pytest.raises(VerificationError, match="is damaged: checksum"):
        job.verify()
    job.run(deep=True)
    assert job.tried == [2, 3]
    assert contents(job) == before


def test_repair_puts_a_damaged_shard_back_into_the_plan(pair: Pair) -> None:
    job = pair.remote
    job.run()
    before = contents(job)
    cut_shard(job)
    with writer_lock(job.store) as lock, pytest.raises(VerificationError, match="2 rows are back in the plan"):
        verify_store(job.store, job.config.dataset.path, 0.0, repair=lock)
    job.run()
    assert job.tried == [2, 3]
    assert contents(job) == before


@pytest.mark.parametrize(
    "fault",
    [
        Fault("answer", "PUT", "safetensors", count=10**6),
        Fault("drop", "PUT", "safetensors", count=10**6, after=100),
        Fault("corrupt", "PUT", "safetensors", count=10**6),
        Fault("answer", "PUT", "000001.json", count=10**6),
        Fault("answer", "HEAD", "safetensors", count=10**6, status=500, code="InternalError"),
        Fault("answer", "PUT", "safetensors", count=10**6, status=400, code="ExpiredToken"),
    ],
    ids=["SlowDown", "drop", "corrupt", "record", "confirmation", "expired"],
)
def test_a_fault_that_lasts_ends_the_run_and_no_half_shard_counts(pair: Pair, proxy: FaultyProxy, fault: Fault) -> None:
    job = pair.remote
    job.run(batches=1)
    before = contents(job)
    with spoiling(proxy, fault), pytest.raises(WriteError, match=r"cannot be written\. Could not .* start the same"):
        job.run()
    assert contents(job) == before
    job.run()
    assert job.tried == [2, 3, 4, 5]
    assert job.verify().rows["done"] == ROWS
    pair.local.run()
    assert contents(job) == contents(pair.local)
    assert len(list(job.store.shards.glob("*.safetensors"))) == 3
    assert [path for path in spool_folder(place(job)).rglob("*") if path.is_file()] == []


def test_a_second_run_on_a_bucket_is_refused(pair: Pair) -> None:
    pair.remote.run(batches=1)
    with writer_lock(pair.remote.store) as first:
        with pytest.raises(OutputError, match=r"is being written by process"):
            pair.remote.run()
        first.check()


def test_other_settings_are_refused_field_by_field(pair: Pair) -> None:
    pair.remote.run(batches=1)
    capture = pair.remote.config.capture.model_copy(update={"final_norm": "pre"})
    pair.remote.config = pair.remote.config.model_copy(update={"capture": capture})
    with pytest.raises(OutputError, match=r"final_norm: the output has 'post', this run has 'pre'"):
        pair.remote.preflight()


def test_a_full_spool_holds_batches_back_and_that_is_said(pair: Pair, proxy: FaultyProxy) -> None:
    job = pair.remote
    job.config = job.config.model_copy(update={"s3": job.config.s3.model_copy(update={"spool_bytes": 1})})
    preflight = job.preflight(space=False)
    config = preflight.config
    server = AttachedServer(job.fake.url, job.fake.staging)
    proxy.rate = 20_000.0  # a shard takes an eighth of a second
    with (
        writer_lock(preflight.store) as lock,
        PrefillEngine([server], preflight.captured, config.extraction, 1 << 20) as engine,
        ThreadPoolExecutor(3) as threads,
    ):
        open_output(preflight)

        def one(batch: int, numbers: list[int]) -> None:
            rows = list(read_planned(config.dataset.path, preflight.plan, numbers, VOCAB))
            extract_batch(batch, rows, engine, preflight.store, preflight.fingerprint, lock)
            assert len(list(lock.workspace.glob("*.safetensors"))) <= 1

        began = time.monotonic()
        done = [threads.submit(one, batch, numbers) for batch, numbers in preflight.missing.items()]
        for future in done:
            future.result()
        seconds = time.monotonic() - began
        usage = engine.usage()
    assert usage["blocked"] > 0.5, usage
    assert seconds > 0.3
    assert job.verify().rows["done"] == ROWS


def test_a_spool_that_is_too_small_for_a_shard_is_said_before_anything_starts(pair: Pair) -> None:
    job = pair.remote
    job.config = job.config.model_copy(update={"s3": job.config.s3.model_copy(update={"spool_bytes": 100})})
    with pytest.raises(SpaceError, match=r"The spool .* may hold 100 B .* the largest shard needs"):
        job.preflight()


def test_plan_says_where_everything_goes(pair: Pair, proxy: FaultyProxy) -> None:
    lines = dict(describe(pair.remote.preflight()))
    assert lines["output"] == f"{place(pair.remote)} at {proxy.url}"
    assert "32.0 GiB at most" in lines["spool"]
    assert list(place(pair.remote).iterdir()) == []


def test_tensors_are_read_from_a_bucket_as_from_a_directory(pair: Pair, proxy: FaultyProxy) -> None:
    pair.remote.run()
    path = shard_of(pair.remote, 2)
    whole = load(path.read_bytes())
    proxy.requests.clear()
    with open_shard(path) as shard:
        assert sorted(shard.keys()) == sorted(whole)
        for name, tensor in whole.items():
            found = shard.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
        with pytest.raises(KeyError):
            shard.get_tensor("r000000.nothing")
    assert proxy.seen("GET") == 1 + len(whole)
    path.write_bytes(b"no shard at all, whatever its name says")
    with pytest.raises(StoreError, match="is no safetensors file"), open_shard(path):
        pass


def test_a_store_in_a_bucket_is_recorded_and_found_by_its_uri(
    pair: Pair, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, root = pair.remote, str(place(pair.remote))
    job.run()
    verified = job.verify()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = record_extraction(job.store, LineageConfig(tracking_uri=uri), uri, tmp_path / "artifacts")
    assert record_extraction(job.store, LineageConfig(tracking_uri=uri), uri, tmp_path / "artifacts") == run
    (extraction,) = lineage_of_extraction(root, uri).extractions
    assert (extraction.run_id, extraction.uri, extraction.digest) == (run, root, verified.digest)
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL_S3": proxy.url,
    }.items():
        monkeypatch.setenv(name, value)
    assert str(StoreSource(root).load().root) == root
    shard_of(job, 0).unlink()
    with pytest.raises(StoreError, match=r"000000.* is gone"):
        StoreSource(root).load()
    assert STATES_URI  # the tag that the lookup went by
    artifacts = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert {"manifest.json", "ledger.parquet", "extraction.json"} <= {path.name for path in artifacts}
    assert_no_keys([*artifacts, tmp_path / "mlflow.db"])


def assert_no_keys(files: list[Path]) -> None:
    for file in files:
        data = file.read_bytes()
        assert KEY.encode() not in data, file
        assert SECRET.encode() not in data, file


def test_keys_are_in_no_object_log_or_config(pair: Pair, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tasks")
    job = pair.remote
    with spoiling(proxy, Fault("answer", "PUT", "safetensors", count=5)):
        job.run()
    job.verify()
    root = place(job)
    stored = b"".join(root.bucket.read(found["Key"])[0] for found in root.bucket.list(f"{root.key}/"))
    preflight = job.preflight()
    shown = [caplog.text, repr(preflight), repr(job.store), json.dumps(job.config.model_dump(mode="json")), repr(KEYS)]
    for text in [stored.decode(errors="replace"), *shown]:
        assert KEY not in text
        assert SECRET not in text
    assert "SlowDown" in caplog.text


def test_a_run_that_is_told_to_stop_waits_for_its_uploads(pair: Pair, proxy: FaultyProxy) -> None:
    """The lock is given back after the last of them."""
    job = pair.remote
    proxy.rate = 10_000.0
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(job.run, batches=1)
        wait_for(lambda: proxy.seen("PUT .*safetensors") == 1, 20)
        assert json.loads(job.store.lock.read_bytes()).get("released") is None
        run.result()
    assert len(read_records(job.store)) == 1
    assert json.loads(job.store.lock.read_bytes())["released"] is True
