"""Partitions of a store: how batches are split, and that their writers and the store's keep out of each other's way."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tasks.dataset.rows import read_planned
from tasks.errors import FleetError, LostLockError, OutputError, StoreError, VerificationError, WriterAliveError
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.fleet.whole import Commits, account, check_sum, keep_fleet_run, keep_partition_run, open_fleet
from tasks.preflight import open_output, run_preflight
from tasks.server.launch import AttachedServer
from tasks.store.bucket_lock import writer_lock
from tasks.store.lock import WriterLock
from tasks.store.partitions import Partition, find_partition, read_split, split_batches
from tasks.store.runs import read_runs
from tests.unit.helpers import VOCAB, FakeSGLang
from tests.unit.jobs import ROWS, Job, make_job


def batches_of(partitions: list[Partition]) -> list[list[int]]:
    return [list(partition.batches) for partition in partitions]


def test_partitions_have_about_as_many_tokens_each() -> None:
    assert batches_of(split_batches(np.full(8, 10), 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches_of(split_batches(np.array([70, 10, 10, 10, 40]), 2)) == [[0], [1, 2, 3, 4]]
    assert batches_of(split_batches(np.array([1, 1, 1, 97]), 2)) == [[0, 1, 2], [3]]


@pytest.mark.parametrize("seed", range(50))
def test_every_batch_with_something_to_do_is_in_one_partition(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1000, random.integers(1, 200)) * (random.random(1) < random.random(200))[0]
    tokens[random.random(len(tokens)) < 0.3] = 0
    count, most = int(random.integers(1, 9)), int(random.integers(1, 40))
    partitions = split_batches(tokens, count, most)
    covered = [batch for partition in partitions for batch in partition.batches]
    assert covered == sorted(set(covered))
    assert set(np.flatnonzero(tokens)) <= set(covered)
    assert [partition.number for partition in partitions] == list(range(len(partitions)))
    for partition in partitions:
        due = np.count_nonzero(tokens[partition.first : partition.end])
        assert 0 < due <= most
        assert tokens[partition.first] > 0


def test_no_partition_has_more_batches_than_a_flow_run_takes() -> None:
    partitions = split_batches(np.ones(4500, dtype=np.int64), 2)
    assert [len(partition.batches) for partition in partitions] == [1125] * 4
    assert split_batches(np.zeros(5), 3) == []
    assert batches_of(split_batches(np.array([0, 5, 0]), 3)) == [[1]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with FakeSGLang(tmp_path / "staging") as fake:
        yield make_job(tmp_path, fake, str(tmp_path / "output"))


def run_partition(job: Job, fleet: str, number: int, before_commit: object = None) -> None:
    """What a flow run of a partition does, without Prefect."""
    preflight = run_preflight(job.config, partition=(fleet, number))
    server = AttachedServer(job.fake.url, job.fake.staging)
    with (
        writer_lock(preflight.store, preflight.partition) as lock,
        PrefillEngine([server], preflight.captured, job.config.extraction, 1 << 20) as engine,
    ):
        open_output(preflight)
        for batch, numbers in preflight.missing.items():
            rows = list(read_planned(job.config.dataset.path, preflight.plan, numbers, VOCAB))
            extract_batch(batch, rows, engine, preflight.store, preflight.fingerprint, lock)
        figures = {"began": f"2026-12-01T00:00:0{number}.000+00:00", "seconds": 10.0}
        keep_partition_run(preflight.store, fleet, number, {**figures, "failed": 0, "retries": 1, "restarts": 0})


def test_partitions_of_three_nodes_are_together_the_store_that_one_writes(job: Job, tmp_path: Path) -> None:
    plans = open_fleet(job.config, 3)
    preflight, partitions = plans.preflight, plans.split.partitions
    assert batches_of(partitions) == [[0], [1], [2]]
    assert account(job.store, preflight.plan, preflight.fingerprint).missing == ROWS
    for number in (2, 0, 1):
        run_partition(job, plans.split.fleet, number)
    parts = [account(job.store, preflight.plan, preflight.fingerprint, one) for one in partitions]
    whole = check_sum(job.store, preflight.plan, preflight.fingerprint, partitions)
    assert (whole.rows, whole.stored, whole.missing) == (ROWS, ROWS, 0)
    assert sum(part.rows for part in parts) == sum(part.stored for part in parts) == ROWS
    keep_fleet_run(plans, retries=0)
    (run,) = read_runs(job.store)
    assert (run["rows"], run["tokens"], run["retries"], run["seconds"]) == (ROWS, 3 * ROWS, 3, 12.0)
    assert job.verify().rows == {"done": ROWS, "truncated": 0, "skipped": 0, "failed": 0}

    alone = make_job(tmp_path, job.fake, str(tmp_path / "alone"))
    alone.run()
    assert job.contents() == alone.contents()


def test_a_whole_with_a_partition_missing_is_refused_and_never_looks_complete(job: Job) -> None:
    plans = open_fleet(job.config, 3)
    preflight = plans.preflight
    for number in (0, 2):
        run_partition(job, plans.split.fleet, number)
    with pytest.raises(FleetError, match=r"2 of 6 rows are not in its records \(partition 1: 2 of 2 rows\)"):
        check_sum(job.store, preflight.plan, preflight.fingerprint, plans.split.partitions)
    assert not job.store.manifest.exists()
    with pytest.raises(Exception, match="2 were not extracted yet"):
        job.verify()
    assert not job.store.manifest.exists()


def test_a_shard_that_vanished_makes_its_partition_incomplete(job: Job) -> None:
    plans = open_fleet(job.config, 3)
    for number in range(3):
        run_partition(job, plans.split.fleet, number)
    job.store.shard(1, 0).unlink()
    found = account(job.store, plans.preflight.plan, plans.preflight.fingerprint, plans.split.partitions[1])
    assert (found.rows, found.stored, found.missing) == (2, 0, 2)


def test_a_fleet_that_resumes_splits_what_is_missing(job: Job) -> None:
    job.run(batches=1)
    plans = open_fleet(job.config, 2)
    assert batches_of(plans.split.partitions) == [[1], [2]]
    assert plans.split.there == {"rows": 2, "tokens": 6, "bytes": job.store.shard(0, 0).stat().st_size}


def test_a_fleet_of_a_complete_store_has_nothing_to_split_and_leaves_it_complete(job: Job) -> None:
    job.run()
    job.verify()
    assert open_fleet(job.config, 2).split.partitions == []
    assert job.store.manifest.exists()


def test_a_run_of_an_earlier_split_is_refused(job: Job) -> None:
    first, second = open_fleet(job.config, 3), open_fleet(job.config, 2)
    with pytest.raises(OutputError, match="was split anew after this run was asked for"):
        run_preflight(job.config, partition=(first.split.fleet, 0))
    with pytest.raises(OutputError, match="has 2 partitions, from 0 on; there is no 2"):
        run_preflight(job.config, partition=(second.split.fleet, 2))


def test_a_run_that_a_new_split_overtakes_before_it_has_its_lock_writes_nothing(job: Job) -> None:
    fleet = open_fleet(job.config, 3).split.fleet
    preflight = run_preflight(job.config, partition=(fleet, 0))
    open_fleet(job.config, 2)
    with writer_lock(preflight.store, preflight.partition), pytest.raises(OutputError, match="was split anew"):
        open_output(preflight)


def test_a_partition_of_a_store_without_a_fleet_is_refused(job: Job) -> None:
    with pytest.raises(OutputError, match="no fleet now"):
        run_preflight(job.config, partition=("abc", 0))


def test_a_damaged_split_is_named(job: Job) -> None:
    open_fleet(job.config, 3)
    (job.store.logs / "fleet.json").write_text("{")
    with pytest.raises(StoreError, match=r"fleet\.json is damaged"):
        read_split(job.store)


def test_a_partition_of_another_dataset_is_refused(job: Job) -> None:
    fleet = open_fleet(job.config, 3).split.fleet
    job.config.dataset.path.write_text(job.config.dataset.path.read_text().replace("1", "3"))
    with pytest.raises(OutputError, match="input_sha256"):
        run_preflight(job.config, partition=(fleet, 0))


def partition(job: Job, number: int) -> Partition:
    split = read_split(job.store)
    assert split is not None
    return find_partition(job.store, split.fleet, number)


def test_partitions_are_written_side_by_side_and_the_whole_is_not_beside_them(job: Job) -> None:
    open_fleet(job.config, 3)
    with writer_lock(job.store, partition(job, 0)) as first, writer_lock(job.store, partition(job, 1)) as second:
        with pytest.raises(WriterAliveError, match=r"is being written by process .* which is alive") as busy:
            writer_lock(job.store).__enter__()
        assert busy.value.lock in ("lock-0000.json", "lock-0001.json")
        with pytest.raises(WriterAliveError):
            writer_lock(job.store, partition(job, 1)).__enter__()
        first.check()
        second.check()
    with writer_lock(job.store), pytest.raises(WriterAliveError):
        writer_lock(job.store, partition(job, 0)).__enter__()
    assert sorted(job.store.root.glob("lock*")) == []


def test_a_fleet_that_starts_again_keeps_the_split_of_runs_that_are_alive(job: Job) -> None:
    split = open_fleet(job.config, 3).split
    with writer_lock(job.store, split.partitions[1]):
        again = open_fleet(job.config, 2)
    assert (again.adopted, again.split) == (True, split)
    anew = open_fleet(job.config, 2)
    assert not anew.adopted
    assert anew.split.fleet != split.fleet


def test_a_fleet_that_starts_again_while_its_whole_is_verified_finds_that(job: Job) -> None:
    plans = open_fleet(job.config, 3)
    for number in range(3):
        run_partition(job, plans.split.fleet, number)
    with writer_lock(job.store), pytest.raises(WriterAliveError):
        open_fleet(job.config, 3)  # somebody else's: the fleet had not come to its end
    kept = keep_fleet_run(plans, retries=0)
    with writer_lock(job.store):
        again = open_fleet(job.config, 3)
        assert (again.adopted, again.split) == (True, plans.split)
        assert keep_fleet_run(again, retries=0) == kept
    assert len(read_runs(job.store)) == 1


def test_a_fleet_does_not_start_beside_an_extraction(job: Job) -> None:
    open_fleet(job.config, 3)
    with writer_lock(job.store), pytest.raises(WriterAliveError):
        open_fleet(job.config, 3)


def leave_dead(lock: WriterLock) -> None:
    """As a writer whose process has died: the lock is there, its process number is another's."""
    content = json.loads(lock.path.read_bytes())
    lock._stop.set()
    lock._thread.join()
    lock.path.write_text(json.dumps(content | {"started": content["started"] - 1}))


def test_the_whole_s_writer_shuts_out_dead_partitions(job: Job) -> None:
    open_fleet(job.config, 3)
    lost = writer_lock(job.store, partition(job, 0)).__enter__()
    leave_dead(lost)
    (job.store.root / "lock-0007.json.0123.work").mkdir()  # of one whose lock was taken away, and no more
    with writer_lock(job.store) as whole:
        whole.check()
        with pytest.raises(LostLockError):
            lost.check()
        with pytest.raises(FileNotFoundError):
            (lost.workspace / "finished").rename(job.store.shard(0, 0))
        assert [path.name for path in sorted(job.store.root.glob("lock*.json"))] == ["lock.json"]
        assert sorted(job.store.root.glob("lock*.work")) == [whole.workspace]


def test_a_partition_shuts_out_a_dead_writer_of_the_whole(job: Job) -> None:
    open_fleet(job.config, 3)
    lost = writer_lock(job.store).__enter__()
    leave_dead(lost)
    with writer_lock(job.store, partition(job, 0)) as lock:
        lock.check()
        with pytest.raises(LostLockError):
            lost.check()


def test_a_partition_removes_what_its_own_batches_left_and_nothing_of_others(job: Job) -> None:
    fleet = open_fleet(job.config, 3).split.fleet
    run_partition(job, fleet, 1)
    being_written = job.store.shard(2, 0)  # of another node, its record not there yet
    being_written.write_bytes(b"whole")
    left = job.store.shard(0, 0)
    left.write_bytes(b"half")
    run_partition(job, fleet, 0)
    assert left.read_bytes() != b"half"
    assert being_written.read_bytes() == b"whole"
    commits = Commits(job.store, read_split(job.store).partitions)  # type: ignore[union-attr]
    commits.refresh()
    assert [commits.count(number) for number in range(3)] == [1, 1, 0]
    assert commits.batches.tolist() == [0, 1]


def test_verification_of_two_partitions_that_both_have_a_batch_would_fail(job: Job) -> None:
    """The books say so, should two ever write the same rows."""
    fleet = open_fleet(job.config, 3).split.fleet
    for number in range(3):
        run_partition(job, fleet, number)
    record = json.loads((job.store.shards / "000001.json").read_text())
    record |= {"part": 1}
    (job.store.shards / "000001.1.json").write_text(json.dumps(record | {"file": "000001.1.safetensors"}))
    (job.store.shards / "000001.1.safetensors").write_bytes(job.store.shard(1, 0).read_bytes())
    with pytest.raises(VerificationError, match="in the books twice"):
        job.verify()
