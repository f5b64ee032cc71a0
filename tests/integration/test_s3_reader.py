"""A store in a bucket, as a trainer reads it: every value as stored, in any process, over a network that fails."""

import os
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tasks.errors import RemoteError, StoreError
from tasks.export.run import export_shard, finish_export, open_export
from tasks.storage import S3Path
from tasks.storage import bucket as bucket_module
from tasks.store.reader import HiddenStates
from tests.integration.faulty_proxy import Fault, FaultyProxy, spoiling
from tests.integration.seaweed import BUCKET, KEY, READER, READER_SECRET, Seaweed
from tests.unit.helpers import SmallStore
from tests.unit.test_reader import ROWS, TOKENS, check
from tests.unit.verified import make_verified, mark_verified


@pytest.fixture(autouse=True)
def environment(proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of somebody who may only read, where boto3 looks for them; faults are given up after seconds."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(bucket_module, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(bucket_module, "LONGEST_WAIT", 0.2)
    monkeypatch.setattr(bucket_module, "PATIENCE", 10.0)


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    return make_verified(tmp_path)


@pytest.fixture
def uri(s3: Seaweed, small: SmallStore) -> str:
    return copy(s3, small, s3.place())


def copy(s3: Seaweed, small: SmallStore, uri: str) -> str:
    """Put a store's files into the bucket as anybody would; the readers' index is not there."""
    prefix = uri.split("/", 3)[3]
    for path in small.store.root.rglob("*"):
        if path.is_file() and path != small.store.index:
            key = f"{prefix}/{path.relative_to(small.store.root)}"
            s3.client().upload_file(str(path), BUCKET, key)
    return uri


def test_every_value_is_the_local_one(uri: str) -> None:
    states = HiddenStates.open(uri)
    assert (states.rows.tolist(), states.tokens.tolist()) == (ROWS, TOKENS)
    assert [shard.tolist() for shard in states.shards] == [[0, 1], [2, 3], [4, 5]]
    for place in (5, 0, 3, 1, 4, 2, 0):
        check(states[place], TOKENS[place])
    ids, mask = states.tokens_of(2)
    assert ids.tolist() == states[2].input_ids.tolist()
    assert mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_an_endpoint_can_be_named(uri: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    check(HiddenStates.open(uri, endpoint_url=proxy.url)[0], 3)


def test_what_is_written_to_a_sample_stays_there(uri: str) -> None:
    states = HiddenStates.open(uri)
    for tensor in states[0][1:5]:
        assert isinstance(tensor, torch.Tensor)
        tensor.zero_()
    check(states[0], 3)


def test_a_row_is_one_request_and_the_index_is_made_once(uri: str, proxy: FaultyProxy) -> None:
    HiddenStates.open(uri)
    records = proxy.seen(r"GET .*/shards/\d+\.json")
    states = HiddenStates.open(uri)
    assert (records, proxy.seen(r"GET .*/shards/\d+\.json")) == (3, 3)
    check(states[0], 3)  # the shard's header, its ids and masks are read with its first row
    before = proxy.seen(r"GET .*\.safetensors")
    check(states[1], 5)
    assert proxy.seen(r"GET .*\.safetensors") == before + 1
    states.tokens_of(0)
    assert proxy.seen(r"GET .*\.safetensors") == before + 1


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same_in_any_order(uri: str, context: str) -> None:
    states = HiddenStates.open(uri)
    check(states[0], 3)  # there are connections already when the workers begin
    loader = DataLoader(states, batch_size=None, shuffle=True, num_workers=2, multiprocessing_context=context)
    samples = {sample.row: sample for sample in loader}
    assert sorted(samples) == ROWS
    for row, tokens in zip(ROWS, TOKENS, strict=True):
        check(samples[row], tokens)
    check(states[1], 5)


def test_a_fork_takes_neither_a_connection_nor_a_lock_that_is_held(uri: str) -> None:
    states = HiddenStates.open(uri)
    check(states[0], 3)
    assert isinstance(states.store.root, S3Path)
    bucket = states.store.root.bucket
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with bucket._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        connected = bucket._client is not None
        check(states[1], 5)
        os._exit(1 if connected else 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bucket._client is not None


def test_it_goes_to_another_process_without_its_connections(uri: str) -> None:
    states = HiddenStates.open(uri)
    size = len(pickle.dumps(states))
    check(states[0], 3)
    data = pickle.dumps(states)
    assert len(data) == size
    assert READER_SECRET.encode() not in data
    check(pickle.loads(data)[1], 5)  # noqa: S301


def test_faults_on_the_way_cost_a_reader_nothing_but_time(uri: str, proxy: FaultyProxy) -> None:
    faults = [
        Fault("answer", "GET", "list-type=2", count=2),
        Fault("answer", "GET", r"manifest\.json", status=500, code="InternalError"),
        Fault("cut", "GET", r"\.safetensors", after=40),  # in the status line or the headers
        Fault("cut", "GET", r"\.safetensors", after=300),
        Fault("cut", "GET", r"\.safetensors", after=1000),  # in the body
    ]
    with spoiling(proxy, *faults):
        states = HiddenStates.open(uri)
        for sample, tokens in zip(states, TOKENS, strict=True):
            check(sample, tokens)
    assert [fault.met for fault in faults] == [2, 1, 1, 1, 1]


def test_what_is_not_whole_is_refused_unless_asked(s3: Seaweed, small: SmallStore, uri: str) -> None:
    client, prefix = s3.client(), uri.split("/", 3)[3]
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/shards/000001.safetensors", Body=b"x")
    with pytest.raises(StoreError, match=r"is damaged: 000001\.safetensors has 1 bytes, not \d+"):
        HiddenStates.open(uri)
    client.delete_object(Bucket=BUCKET, Key=f"{prefix}/manifest.json")
    with pytest.raises(StoreError, match="not complete, or not verified"):
        HiddenStates.open(uri)
    states = HiddenStates.open(uri, incomplete=True)
    assert states.rows.tolist() == [0, 1, 5, 6]
    assert len(states.left_out) == 1
    check(states[3], 6)


def test_records_that_changed_are_read_again(s3: Seaweed, small: SmallStore, uri: str) -> None:
    HiddenStates.open(uri)
    path = small.record_path(6)
    path.write_text(path.read_text().replace('"part"', ' "part"'))
    mark_verified(small)
    copy(s3, small, uri)
    check(HiddenStates.open(uri)[5], 6)


def test_who_may_not_read_is_told_so(s3: Seaweed, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="holds no hidden states"):
        HiddenStates.open(s3.place())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    with pytest.raises(RemoteError, match="the secret key is wrong") as caught:
        HiddenStates.open(uri)
    assert not re.search(READER_SECRET, str(caught.value))


def test_an_export_of_a_bucket_is_that_of_a_directory(small: SmallStore, uri: str, tmp_path: Path) -> None:
    for name, store in (("remote", uri), ("local", small.store.root)):
        job = open_export(store, "pt", tmp_path / name)
        for shard in range(len(job.shards)):
            export_shard(job, shard)
        assert finish_export(job)["exported_rows"] == len(ROWS)
    files = [path.relative_to(tmp_path / "local") for path in (tmp_path / "local").rglob("*.pt")]
    assert len(files) == len(ROWS)
    for file in files:
        assert (tmp_path / "remote" / file).read_bytes() == (tmp_path / "local" / file).read_bytes()
