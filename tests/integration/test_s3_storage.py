"""Objects in a bucket of a real server: uploads, reads and conditions, with faults injected on the way."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.config import S3Config
from tasks.errors import OutputError, RemoteError
from tasks.files import checksum_of
from tasks.storage import S3Path, as_location, read_all
from tasks.storage import bucket as bucket_module
from tasks.storage.access import check_access
from tasks.storage.bucket import Credentials, PreconditionError
from tasks.storage.upload import Uploaded, abort_uploads, upload
from tests.integration.faulty_proxy import Fault, FaultyProxy, spoiling
from tests.integration.seaweed import KEY, READER, READER_SECRET, SECRET, Seaweed

PART = 5 << 20
SIZE = 3 * PART + 12345
PARTS = "partNumber="


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that last are given up after seconds, not minutes."""
    monkeypatch.setattr(bucket_module, "PATIENCE", 20.0)
    monkeypatch.setattr(bucket_module, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(bucket_module, "LONGEST_WAIT", 0.2)
    monkeypatch.setattr(bucket_module, "READ_TIMEOUT", 2)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "000007-0123abcd.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def root(s3: Seaweed, proxy: FaultyProxy) -> S3Path:
    """A prefix of a new bucket, reached through the proxy."""
    return place(s3, proxy.url)


def place(s3: Seaweed, url: str, credentials: Credentials | None = None, **config: object) -> S3Path:
    keys = credentials or Credentials(KEY, SECRET)
    made = S3Config(endpoint_url=url, part_bytes=PART, **config)  # type: ignore[arg-type]
    found = as_location(s3.place(), made, lambda: keys)
    assert isinstance(found, S3Path)
    return found


def assert_whole(path: S3Path, shard: Path, done: Uploaded, s3: Seaweed) -> None:
    """What lies in the bucket, read by boto3 alone, is the file, and no upload was left unfinished."""
    client = s3.client()
    stored = client.get_object(Bucket=path.bucket.name, Key=path.key)["Body"].read()
    assert stored == shard.read_bytes()
    assert (done.bytes, done.parts) == (SIZE, 4)
    assert client.list_multipart_uploads(Bucket=path.bucket.name, Prefix=path.key).get("Uploads", []) == []


def assert_nothing(path: S3Path, s3: Seaweed) -> None:
    """Neither an object nor an unfinished upload."""
    client = s3.client()
    assert client.list_objects_v2(Bucket=path.bucket.name, Prefix=path.key).get("Contents", []) == []
    assert client.list_multipart_uploads(Bucket=path.bucket.name, Prefix=path.key).get("Uploads", []) == []


@pytest.mark.parametrize("checksum", ["crc32", "sha256", "md5"])
def test_a_file_arrives_whole_and_the_store_says_so(
    s3: Seaweed, proxy: FaultyProxy, shard: Path, checksum: str
) -> None:
    path = place(s3, proxy.url, checksum=checksum) / shard.name
    done = upload(shard, path)
    assert_whole(path, shard, done, s3)
    assert done.checksum.endswith("-4")
    if checksum != "md5":
        head = s3.client().head_object(Bucket=path.bucket.name, Key=path.key, ChecksumMode="ENABLED")
        assert head[f"Checksum{checksum.upper()}"] == done.checksum


PASSING = {
    "SlowDown": Fault("answer", "PUT", PARTS, count=7),
    "500 while parts are sent": Fault("answer", "PUT", PARTS, count=7, status=500, code="InternalError"),
    "500 at the beginning": Fault("answer", "POST", r"uploads", count=4, status=500, code="InternalError"),
    "503 at the end": Fault("answer", "POST", "uploadId", count=4),
    "a connection that breaks in mid-part": Fault("drop", "PUT", PARTS, count=5, after=1 << 20),
    "a part that is never answered": Fault("hang", "PUT", PARTS, count=2),
    "a byte that changes on the way": Fault("corrupt", "PUT", PARTS, count=3),
    "a part's answer that is lost": Fault("lose", "PUT", PARTS, count=3),
    "the last answer that is lost": Fault("lose", "POST", "uploadId", count=1),
    "the last answer that is lost again and again": Fault("lose", "POST", "uploadId", count=5),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_fault_that_passes_costs_an_upload_nothing(
    root: S3Path, s3: Seaweed, proxy: FaultyProxy, shard: Path, fault: Fault
) -> None:
    fault.met = 0
    path = root / shard.name
    with spoiling(proxy, fault):
        done = upload(shard, path)
    assert fault.met == fault.count
    assert_whole(path, shard, done, s3)


LASTING: dict[str, tuple[Fault, str]] = {
    "SlowDown": (
        Fault("answer", "PUT", PARTS, count=10**6),
        r"Could not upload part \d of .*SlowDown .*tried for",
    ),
    "connections that break": (
        Fault("drop", "PUT", PARTS, count=10**6, after=1000),
        r"Could not upload part .*Connection",
    ),
    "bytes that change": (Fault("corrupt", "PUT", PARTS, count=10**6), "Could not upload part .*BadDigest"),
    "a store that refuses the end": (
        Fault("answer", "POST", "uploadId", count=10**6, status=500, code="InternalError"),
        "Could not complete the upload .*InternalError",
    ),
    "credentials that have expired": (
        Fault("answer", ".*", "", count=10**6, status=400, code="ExpiredToken"),
        "ExpiredToken .*the credentials have expired: renew them",
    ),
    "a bucket that is gone": (
        Fault("answer", "PUT", PARTS, count=10**6, status=404, code="NoSuchBucket"),
        "NoSuchBucket .*the bucket does not exist: create it",
    ),
    "a permission that is gone": (
        Fault("answer", "PUT", PARTS, count=10**6, status=403, code="AccessDenied"),
        "AccessDenied .*the credentials do not allow it",
    ),
}


@pytest.mark.parametrize(("fault", "message"), LASTING.values(), ids=LASTING)
def test_a_fault_that_lasts_is_an_error_that_says_what_to_do_and_leaves_nothing(
    root: S3Path, s3: Seaweed, proxy: FaultyProxy, shard: Path, fault: Fault, message: str
) -> None:
    root.bucket.patience = 3.0
    began = time.monotonic()
    with spoiling(proxy, fault), pytest.raises(RemoteError, match=message) as refused:
        upload(shard, root / shard.name)
    assert time.monotonic() - began < 25
    assert SECRET not in str(refused.value)
    assert KEY not in str(refused.value)
    if "expired" not in message:
        assert_nothing(root, s3)


def test_expired_credentials_are_asked_for_again(s3: Seaweed, proxy: FaultyProxy, shard: Path) -> None:
    asked: list[float] = []

    def source() -> Credentials:
        asked.append(time.monotonic())
        return Credentials(KEY, SECRET)

    config = S3Config(endpoint_url=proxy.url, part_bytes=PART)
    path = as_location(f"{s3.place()}/{shard.name}", config, source)
    assert isinstance(path, S3Path)
    with spoiling(proxy, Fault("answer", "PUT", PARTS, count=3, status=400, code="ExpiredToken")):
        done = upload(shard, path)
    assert_whole(path, shard, done, s3)
    assert 2 <= len(asked) <= 4


@pytest.mark.parametrize(
    "fault",
    [
        Fault("cut", "GET", "safetensors", count=5, after=900_000),
        Fault("answer", "GET", "safetensors", count=5),
        Fault("hang", "GET", "safetensors", count=1),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_file_is_read_to_its_end_though_connections_break(
    root: S3Path, proxy: FaultyProxy, shard: Path, fault: Fault
) -> None:
    path = root / shard.name
    upload(shard, path)
    fault.met = 0
    with spoiling(proxy, fault):
        assert checksum_of(path) == checksum_of(shard)
    assert fault.met == fault.count


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(root: S3Path, shard: Path) -> None:
    path = root / shard.name
    upload(shard, path)
    with path.open("rb", buffering=0) as file:
        assert file.read(10) == shard.read_bytes()[:10]
        path.write_bytes(b"another")
        file.seek(1 << 20)
        with pytest.raises((RemoteError, PreconditionError)):
            file.read(10)


def test_ranges_are_those_of_the_file(root: S3Path, shard: Path) -> None:
    path, data = root / shard.name, shard.read_bytes()
    upload(shard, path)
    for start, size in [(0, 1), (PART - 3, 7), (SIZE - 5, 100), (12345, 0)]:
        assert path.read_range(start, size) == data[start : start + size]


def test_paths_behave_as_those_of_a_directory(root: S3Path) -> None:
    assert not root.exists()
    for name in ("000001.json", "000000.json", "000000-ab.safetensors", ".000002.json.17.tmp", "folder/inside.json"):
        (root / "shards" / name).write_bytes(name.encode())
    shards = root / "shards"
    assert root.exists()
    assert shards.is_dir()
    assert [path.name for path in sorted(shards.glob("[0-9]*.json"))] == ["000000.json", "000001.json"]
    assert [path.name for path in shards.glob(".*.tmp")] == [".000002.json.17.tmp"]
    assert sorted(path.name for path in shards.iterdir())[-1] == "folder"
    assert list(read_all(sorted(shards.glob("[0-9]*.json")))) == [b"000000.json", b"000001.json"]
    path = shards / "000001.json"
    assert (path.stat().st_size, path.suffix, str(path.with_suffix(".x"))[-8:]) == (11, ".json", "000001.x")
    assert abs(path.stat().st_mtime - time.time()) < 60
    path.unlink()
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    with pytest.raises(FileNotFoundError):
        path.unlink()
    path.unlink(missing_ok=True)


def test_more_objects_than_a_listing_has_are_all_found(root: S3Path) -> None:
    names = [f"{number:06d}.json" for number in range(1100)]
    list(root.bucket.pool.map(lambda name: (root / name).write_bytes(name.encode()), names))
    found = sorted(root.glob("[0-9]*.json"))
    assert [path.name for path in found] == names
    assert list(read_all(found)) == [name.encode() for name in names]


def test_what_was_read_once_is_not_read_again_unless_it_changed(root: S3Path, proxy: FaultyProxy) -> None:
    (root / "a.json").write_bytes(b"1")
    (root / "b.json").write_bytes(b"2")
    assert list(read_all(sorted(root.glob("*.json")))) == [b"1", b"2"]
    (root / "b.json").write_bytes(b"3")
    proxy.requests.clear()
    assert list(read_all(sorted(root.glob("*.json")))) == [b"1", b"3"]
    assert proxy.seen("GET .*a.json") == 0
    assert proxy.seen("GET .*b.json") == 1


def test_unfinished_uploads_of_a_prefix_are_aborted_and_no_others(root: S3Path, s3: Seaweed) -> None:
    client = s3.client()
    for key in (f"{root.key}/shards/1", f"{root.key}/shards/2", f"{root.key}-other/shards/3"):
        client.create_multipart_upload(Bucket=root.bucket.name, Key=key)
    assert abort_uploads(root) == 2
    left = client.list_multipart_uploads(Bucket=root.bucket.name, Prefix=root.parent.key)["Uploads"]
    assert [found["Key"] for found in left] == [f"{root.key}-other/shards/3"]


def test_a_place_that_may_be_used_is_left_as_it_was(root: S3Path, s3: Seaweed) -> None:
    check_access(root)
    assert_nothing(root, s3)


def expect_refusal(root: S3Path, message: str) -> str:
    with pytest.raises(OutputError, match=message) as refused:
        check_access(root)
    assert "Nothing was started." in str(refused.value)
    return str(refused.value)


def test_a_bucket_that_does_not_exist_is_named(root: S3Path) -> None:
    root.bucket.name = "no-such-bucket-here"
    expect_refusal(root, r"The bucket s3://no-such-bucket-here does not exist at http://.*create it")


def test_credentials_that_may_not_write_are_named(s3: Seaweed, proxy: FaultyProxy) -> None:
    reader = place(s3, proxy.url, Credentials(READER, READER_SECRET))
    text = expect_refusal(reader, "s3:PutObject is denied")
    assert READER_SECRET not in text


@pytest.mark.parametrize(
    ("fault", "permission"),
    [
        (Fault("answer", "GET", "probe", count=99, status=403, code="AccessDenied"), "s3:GetObject is denied"),
        (
            Fault("answer", "DELETE", "tmp$|tmp[?]x", count=99, status=403, code="AccessDenied"),
            "s3:DeleteObject is denied",
        ),
        (Fault("answer", "GET", "list-type", count=99, status=403, code="AccessDenied"), "s3:ListBucket is denied"),
        (Fault("answer", "GET", "uploads", count=99, status=403, code="AccessDenied"), "MultipartUpload.* is denied"),
    ],
    ids=["read", "delete", "list", "uploads"],
)
def test_each_permission_that_is_missing_is_named(
    root: S3Path, proxy: FaultyProxy, fault: Fault, permission: str
) -> None:
    with spoiling(proxy, fault):
        expect_refusal(root, permission)


def test_a_wrong_secret_is_named(s3: Seaweed, proxy: FaultyProxy) -> None:
    wrong = place(s3, proxy.url, Credentials(KEY, "not-the-secret"))
    assert "not-the-secret" not in expect_refusal(wrong, "is denied|the secret key is wrong")


def test_a_store_that_does_not_answer_is_named(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.storage.access.HURRY", 1.0)
    nobody = place(s3, "http://127.0.0.1:9")
    expect_refusal(nobody, r"Could not find the bucket .*Connect.*output.path")


def test_a_store_without_conditional_writes_is_refused(root: S3Path, proxy: FaultyProxy) -> None:
    with spoiling(proxy, Fault("answer", "PUT", header="if-none-match", status=200)):
        expect_refusal(root, "does not refuse a write against IfNoneMatch, so two runs could write to one output")


def test_a_store_that_ignores_checksums_is_refused(root: S3Path, proxy: FaultyProxy) -> None:
    probes = Fault("answer", "PUT", "probe", header="x-amz-checksum-crc32", count=1, status=200)
    probes.matches = lambda request: proxy.seen("PUT .*probe") == 4  # type: ignore[method-assign]
    with spoiling(proxy, probes):
        expect_refusal(root, "takes an object with a wrong crc32 checksum: set s3.checksum to md5")


def test_a_store_that_says_no_checksum_is_found_out(
    s3: Seaweed, proxy: FaultyProxy, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = place(s3, proxy.url)
    path = root / shard.name
    head: Callable[..., object] = lambda client, **more: {"ContentLength": SIZE}  # noqa: E731
    client = root.bucket.client()
    monkeypatch.setattr(client, "head_object", lambda **arguments: head(client))
    with pytest.raises(RemoteError, match=r"says no crc32 checksum of s3://.*: set s3.checksum to md5"):
        upload(shard, path)
