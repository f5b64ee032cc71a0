"""One writer a store in a bucket, whoever dies, is paused, or loses an answer."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.config import S3Config
from tasks.errors import LostLockError, OutputError, WriterAliveError
from tasks.processes import identity
from tasks.storage import S3Path, as_location
from tasks.storage import bucket as bucket_module
from tasks.storage.bucket import Credentials
from tasks.store import lock as lock_module
from tasks.store.bucket_lock import BucketLock, writer_lock
from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tasks.store.partitions import Partition
from tasks.store.record import Record, record_path, write_record
from tests.integration.faulty_proxy import Fault, FaultyProxy, spoiling
from tests.integration.seaweed import KEY, SECRET, Seaweed
from tests.unit.helpers import wait_for

RECORD = Record("f" * 64, 0, 0, None, 0, "", "raw", [], [], {})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(bucket_module, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.1)
    monkeypatch.setattr(lock_module, "STALE", 1.0)
    monkeypatch.setattr(lock_module, "LOOK", 0.05)


@pytest.fixture
def store(s3: Seaweed, proxy: FaultyProxy) -> Store:
    config = S3Config(endpoint_url=proxy.url)
    return Store(as_location(s3.place(), config, lambda: Credentials(KEY, SECRET)))


def content(store: Store) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(store.lock.read_bytes())
    return value


def leave_lock(store: Store, **owner: Any) -> None:
    """A lock as another writer leaves it; a living one, unless said otherwise."""
    assert isinstance(store.lock, S3Path)
    values = {"owner": "another", **identity(), "since": "2026-11-29T10:00:00+00:00", "beat": 7}
    store.lock.write_bytes(json.dumps(values | owner).encode())


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_lock_is_taken_renewed_and_given_back(store: Store) -> None:
    with writer_lock(store) as lock:
        lock.check()
        assert content(store)["owner"] == lock.owner
        wait_for(lambda: content(store)["beat"] >= 2)
        lock.check()
        assert lock.workspace.is_dir()
    assert content(store)["released"] is True
    assert not lock.workspace.exists()
    with writer_lock(store) as again:
        again.check()


def test_of_many_that_want_a_new_store_one_gets_it(store: Store) -> None:
    begin, end = threading.Barrier(16), threading.Event()

    def take(number: int) -> bool:
        lock = writer_lock(store)
        begin.wait()
        try:
            with lock:
                end.wait(30)
                return True
        except OutputError:
            return False

    with ThreadPoolExecutor(16) as threads:
        takes = [threads.submit(take, number) for number in range(16)]
        wait_for(lambda: sum(take.done() for take in takes) == 15, 60)
        end.set()
    assert sorted(take.result() for take in takes) == [False] * 15 + [True]


def test_of_many_that_find_a_dead_owner_one_takes_over(store: Store) -> None:
    leave_lock(store, pid=ended_process())
    test_of_many_that_want_a_new_store_one_gets_it(store)


def test_a_second_writer_is_refused_naming_the_first(store: Store) -> None:
    with writer_lock(store) as first:
        with pytest.raises(OutputError, match=r"is being written by process \d+ on .*, which is alive"):
            writer_lock(store).__enter__()
        first.check()


def test_an_owner_elsewhere_is_watched_and_respected_while_it_lives(store: Store) -> None:
    leave_lock(store, host="elsewhere")
    beat = threading.Timer(0.3, leave_lock, [store], {"host": "elsewhere", "beat": 8})
    beat.start()
    with pytest.raises(OutputError, match="on elsewhere"):
        writer_lock(store).__enter__()
    beat.join()


def test_an_owner_elsewhere_that_gives_no_sign_of_life_is_taken_over(store: Store) -> None:
    leave_lock(store, host="elsewhere")
    with writer_lock(store) as lock:
        lock.check()


def test_a_writer_that_lost_the_lock_says_so_and_gives_nothing_back(store: Store) -> None:
    lost = writer_lock(store).__enter__()
    leave_lock(store, pid=ended_process())  # as if it had been taken over, by one that died
    with writer_lock(store) as lock:
        with pytest.raises(LostLockError):
            lost.check()
        with pytest.raises(LostLockError):
            write_record(store, RECORD, lost)
        assert not lost.workspace.exists()
        lost.__exit__()
        lock.check()
        assert not record_path(store, 0, 0).exists()


def pretend_to_hold(lock: WriterLock) -> None:
    """As a writer that was paused after its last look at the lock."""
    lock.check = lambda: None  # type: ignore[method-assign]


def test_a_late_record_of_a_lost_writer_does_not_replace_one_that_is_there(store: Store) -> None:
    lost = writer_lock(store).__enter__()
    assert isinstance(lost, BucketLock)
    path = record_path(store, 0, 0)
    assert isinstance(path, S3Path)
    leave_lock(store, pid=ended_process())
    with writer_lock(store) as lock:
        write_record(store, RECORD, lock)
        with pytest.raises(bucket_module.PreconditionError):
            path.write_bytes(b"late", IfNoneMatch="*")  # what the lost one was about to send
        lock.check()
    lost.__exit__()


def test_a_late_record_of_a_lost_writer_is_replaced_and_is_no_part_of_the_batch(store: Store) -> None:
    lost = writer_lock(store).__enter__()
    leave_lock(store, pid=ended_process())
    with writer_lock(store) as lock:
        pretend_to_hold(lost)
        lost.write(record_path(store, 0, 0), b"late")
        assert lock.next_part(store, 0) == 0
        write_record(store, RECORD, lock)
        assert lock.next_part(store, 0) == 1
        assert b"late" not in record_path(store, 0, 0).read_bytes()
    lost.__exit__()


def test_uploads_and_files_of_an_earlier_writer_are_removed(store: Store, s3: Seaweed) -> None:
    assert isinstance(store.shards, S3Path)
    s3.client().create_multipart_upload(Bucket=store.shards.bucket.name, Key=f"{store.shards.key}/000000-x.safetensors")
    with writer_lock(store) as first:
        left = first.workspace.with_name("dead.work")
    left.mkdir(parents=True)
    (left / "000000-x.safetensors").write_bytes(b"x")
    with writer_lock(store):
        assert not left.exists()
        found = s3.client().list_multipart_uploads(Bucket=store.shards.bucket.name, Prefix=store.shards.key)
        assert found.get("Uploads", []) == []


@pytest.mark.parametrize("count", [1, 4], ids=["once", "also botocore's own tries"])
def test_a_lock_whose_answer_is_lost_is_held_all_the_same(store: Store, proxy: FaultyProxy, count: int) -> None:
    fault = Fault("lose", "PUT", "lock.json", count=count)
    with spoiling(proxy, fault), writer_lock(store) as lock:
        assert fault.met == count
        lock.check()
        proxy.faults[:] = [Fault("lose", "PUT", "lock.json", count=count)]
        beat = content(store)["beat"]
        wait_for(lambda: content(store)["beat"] > beat + 1, 20)
        lock.check()
    assert content(store)["released"] is True


def test_a_record_whose_answer_is_lost_is_written_once(store: Store, proxy: FaultyProxy) -> None:
    with writer_lock(store) as lock, spoiling(proxy, Fault("lose", "PUT", "000000.json", count=4)):
        write_record(store, RECORD, lock)
        assert json.loads(record_path(store, 0, 0).read_bytes())["fingerprint"] == RECORD.fingerprint
        assert lock.next_part(store, 0) == 1


def test_heartbeats_that_fail_for_a_while_do_not_cost_the_lock(store: Store, proxy: FaultyProxy) -> None:
    with writer_lock(store) as lock:
        beat = content(store)["beat"]
        with spoiling(proxy, Fault("answer", "PUT", "lock.json", count=9)):
            wait_for(lambda: proxy.faults[0].met == 9, 30)
        wait_for(lambda: content(store)["beat"] > beat + 1, 20)
        lock.check()


PARTITIONS = [Partition(0, 0, 5), Partition(1, 5, 9)]


def begun_uploads(store: Store, s3: Seaweed) -> list[str]:
    assert isinstance(store.shards, S3Path)
    found = s3.client().list_multipart_uploads(Bucket=store.shards.bucket.name, Prefix=f"{store.shards.key}/")
    return sorted(upload["Key"].rpartition("/")[2] for upload in found.get("Uploads", []))


def begin_upload(store: Store, s3: Seaweed, name: str) -> None:
    assert isinstance(store.shards, S3Path)
    s3.client().create_multipart_upload(Bucket=store.shards.bucket.name, Key=f"{store.shards.key}/{name}")


def test_partitions_are_written_side_by_side_and_touch_nothing_of_each_other(store: Store, s3: Seaweed) -> None:
    with writer_lock(store, PARTITIONS[0]) as first:
        begin_upload(store, s3, "000004-ab.safetensors")
        begin_upload(store, s3, "000005-ab.safetensors")
        with writer_lock(store, PARTITIONS[1]) as second:
            assert begun_uploads(store, s3) == ["000004-ab.safetensors"]  # of the other one, which lives
            first.check()
            second.check()
            assert first.workspace.is_dir()
            with pytest.raises(WriterAliveError, match="is being written by process"):
                writer_lock(store).__enter__()
            with pytest.raises(WriterAliveError):
                writer_lock(store, PARTITIONS[1]).__enter__()
    with writer_lock(store), pytest.raises(WriterAliveError):
        writer_lock(store, PARTITIONS[0]).__enter__()
    with writer_lock(store):
        assert begun_uploads(store, s3) == []


def test_the_whole_s_writer_shuts_out_a_partition_whose_node_was_lost(store: Store) -> None:
    lost = writer_lock(store, PARTITIONS[0]).__enter__()
    lost._stop.set()
    lost._thread.join()
    path = store.partition_lock(0)
    assert isinstance(path, S3Path)
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | {"host": "elsewhere"}).encode())
    with writer_lock(store) as whole:
        whole.check()
        with pytest.raises(LostLockError):
            lost.check()
        with pytest.raises(LostLockError):
            write_record(store, RECORD, lost)
    lost.__exit__()
    assert json.loads(path.read_bytes())["released"] is True


def test_a_partition_s_late_record_of_a_lost_node_is_replaced(store: Store) -> None:
    lost = writer_lock(store, PARTITIONS[0]).__enter__()
    path = store.partition_lock(0)
    assert isinstance(path, S3Path)
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | {"pid": ended_process()}).encode())
    with writer_lock(store, PARTITIONS[0]) as lock:
        pretend_to_hold(lost)
        lost.write(record_path(store, 0, 0), b"late")
        write_record(store, RECORD, lock)
        assert b"late" not in record_path(store, 0, 0).read_bytes()
    lost.__exit__()


def test_the_spool_of_a_dead_partition_is_removed_whichever_comes_next_on_that_host(store: Store) -> None:
    with writer_lock(store, PARTITIONS[0]) as first:
        left = first.workspace
    left.mkdir()
    (left / "owner.json").write_text(json.dumps(identity() | {"pid": ended_process()}))
    (left / "000000-x.safetensors").write_bytes(b"x")
    with writer_lock(store, PARTITIONS[1]):
        assert not left.exists()
