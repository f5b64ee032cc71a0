"""Places of a store, without a network: names, checksums, the spool, what is said of errors."""

import base64
import hashlib
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.stub import Stubber

from tasks.config import S3Config, parse_config
from tasks.errors import ConfigError, DrillcoreError, RemoteError
from tasks.storage import S3Path, as_argument, as_location, is_remote, side_folder
from tasks.storage import bucket as bucket_module
from tasks.storage.bucket import Bucket, Credentials
from tasks.storage.checksums import wanted_of
from tasks.storage.spool import Spool
from tasks.storage.upload import upload
from tasks.store.layout import Store
from tasks.uris import parse_s3_uri
from tests.unit.helpers import wait_for
from tests.unit.test_config import MINIMAL, refusal

KEYS = Credentials("the-access-key", "the-secret-key", "the-token")


def remote(uri: str = "s3://bucket/some/where", **config: Any) -> S3Path:
    path = as_location(uri, S3Config(endpoint_url="http://127.0.0.1:9", **config), lambda: KEYS)
    assert isinstance(path, S3Path)
    return path


def output_of(place: str) -> Path | str:
    return parse_config(MINIMAL | {"output": {"path": place}}, "test").output.path


def test_the_output_is_a_directory_or_a_place_in_a_bucket() -> None:
    assert output_of("out") == Path("out").absolute()
    assert output_of("s3://my-bucket/a/b/") == "s3://my-bucket/a/b"
    assert parse_s3_uri("s3://my-bucket/a/b") == ("my-bucket", "a/b")
    config = parse_config(MINIMAL | {"output": {"path": "s3://my-bucket/a"}}, "test")
    assert config.model_dump(mode="json")["output"]["path"] == "s3://my-bucket/a"
    assert parse_config(config.model_dump(mode="json"), "again") == config


@pytest.mark.parametrize("place", ["s3://", "s3://bucket", "s3://bucket/", "s3:///a", "s3://b/a", "s3://bucket/a/../b"])
def test_a_place_without_bucket_or_prefix_is_refused(place: str) -> None:
    assert "output.path" in refusal({"output": {"path": place}})
    with pytest.raises(ConfigError, match="s3://BUCKET/PREFIX is expected"):
        as_location(place)


def test_other_schemes_are_refused() -> None:
    assert "a directory, or s3://BUCKET/PREFIX, is expected" in refusal({"output": {"path": "gs://bucket/a"}})


@pytest.mark.parametrize("url", ["http://user:password@host", "host:9000"])
def test_an_endpoint_with_a_password_or_without_a_scheme_is_refused(url: str) -> None:
    text = refusal({"s3": {"endpoint_url": url}})
    assert "s3.endpoint_url: Value error, http:// or https:// is expected" in text
    assert "password@" not in text


def test_names_in_a_bucket_are_those_of_paths() -> None:
    store = Store(remote())
    assert str(store.shard(7, 1)) == "s3://bucket/some/where/shards/000007.1.safetensors"
    assert (store.shard(7, 1).name, store.shard(7, 1).suffix) == ("000007.1.safetensors", ".safetensors")
    assert str(store.lock.with_name("x")) == "s3://bucket/some/where/x"
    assert store.manifest.parent == store.root
    assert str(as_location("s3://bucket/a").parent) == "s3://bucket"
    assert (remote() / ".probe").suffix == ""
    assert is_remote(store.root)
    assert not is_remote(Path("s3"))


def test_two_stores_have_two_folders_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path))
    one, other = (side_folder(remote(f"s3://bucket/some{sign}where")) for sign in "/-")
    assert one != other
    assert one.parent == other.parent == tmp_path / "remote"
    assert Store(remote()).beside == side_folder(remote()) / "where"
    assert Store(tmp_path / "x").beside == tmp_path / "x"


def test_a_place_is_told_to_a_command_with_what_it_takes_to_reach_it() -> None:
    argument = as_argument(remote(credentials_block="keys"))
    assert argument == "s3://bucket/some/where --endpoint-url http://127.0.0.1:9 --credentials-block keys"
    assert as_argument(Path("/data/x")) == "/data/x"


def test_checksums_are_those_that_s3_documents() -> None:
    parts = [b"first", b"second"]
    digests = [hashlib.sha256(part).digest() for part in parts]
    whole = base64.b64encode(hashlib.sha256(b"".join(digests)).digest()).decode()
    assert wanted_of("sha256", digests, multipart=True) == f"{whole}-2"
    assert wanted_of("sha256", digests[:1], multipart=False) == base64.b64encode(digests[0]).decode()
    md5 = [hashlib.md5(part).digest() for part in parts]
    assert wanted_of("md5", md5, multipart=True) == f"{hashlib.md5(b''.join(md5)).hexdigest()}-2"
    assert wanted_of("md5", md5[:1], multipart=False) == hashlib.md5(b"first").hexdigest()
    crc = zlib.crc32(b"first").to_bytes(4, "big")
    assert wanted_of("crc32", [crc], multipart=False) == base64.b64encode(crc).decode()


def answered(path: S3Path, monkeypatch: pytest.MonkeyPatch) -> Stubber:
    """The client's answers from here on, without a network; botocore's Stubber checks the requests."""
    monkeypatch.setattr(bucket_module, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(bucket_module, "LONGEST_WAIT", 0.001)
    path.bucket.patience = 0.5
    return Stubber(path.bucket.client())


def test_a_store_whose_checksum_differs_has_its_object_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, file = remote(), tmp_path / "file"
    file.write_bytes(b"content")
    checksum = base64.b64encode(zlib.crc32(b"content").to_bytes(4, "big")).decode()
    where = {"Bucket": "bucket", "Key": "some/where"}
    with answered(path, monkeypatch) as stub:
        stub.add_response("put_object", {"ETag": "x"}, {**where, "Body": b"content", "ChecksumCRC32": checksum})
        found = {"ContentLength": 7, "ChecksumCRC32": "AAAAAA=="}
        stub.add_response("head_object", found, {**where, "ChecksumMode": "ENABLED"})
        stub.add_response("delete_object", {}, where)
        with pytest.raises(RemoteError, match=rf"arrived damaged: the store has the crc32 AAAAAA==, {checksum} was"):
            upload(file, path)
        stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "status", "tries", "says"),
    [
        ("SlowDown", 503, 2, None),
        ("InternalError", 500, 2, None),
        ("RequestTimeout", 400, 2, None),
        ("ExpiredToken", 400, 1, "have expired: renew them"),
        ("AccessDenied", 403, 1, "do not allow it"),
        ("NoSuchBucket", 404, 1, "does not exist: create it"),
        ("SignatureDoesNotMatch", 403, 1, "the secret key is wrong"),
    ],
)
def test_errors_that_may_pass_are_tried_again_and_others_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, code: str, status: int, tries: int, says: str | None
) -> None:
    path = remote()
    with answered(path, monkeypatch) as stub:
        if code == "ExpiredToken":
            path.bucket.patience = 0.0
        stub.add_client_error("put_object", code, "no", status)
        if says is None:
            stub.add_response("put_object", {"ETag": "x"})
            assert path.write_bytes(b"x") == "x"
        else:
            with pytest.raises(RemoteError, match=says) as refused:
                path.write_bytes(b"x")
            assert refused.value.code == code
            assert isinstance(refused.value, OSError)
            assert isinstance(refused.value, DrillcoreError)
        stub.assert_no_pending_responses()
    assert path.bucket.retries == tries - 1


def test_expired_keys_are_asked_for_again_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_WAIT", 0.001)
    asked: list[int] = []

    def source() -> Credentials:
        asked.append(1)
        return KEYS

    bucket = Bucket("bucket", S3Config(), source)
    codes = ["SlowDown", "ExpiredToken", "SlowDown"]

    def work(client: Any) -> str:
        if codes:
            raise ClientError({"Error": {"Code": codes.pop(0)}}, "PutObject")
        return "done"

    assert bucket.call("do something", work) == "done"
    assert len(asked) == 2


def test_what_goes_wrong_without_an_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_WAIT", 0.001)
    bucket = Bucket("bucket", S3Config())
    bucket.patience = 0.01

    def fail(error: Exception) -> str:
        def work(client: Any) -> None:
            raise error

        with pytest.raises(RemoteError) as refused:
            bucket.call("read s3://bucket/x", work)
        return str(refused.value)

    assert "AWS_ACCESS_KEY_ID" in fail(NoCredentialsError())
    assert "Could not connect" in fail(EndpointConnectionError(endpoint_url="http://127.0.0.1:9"))
    with pytest.raises(ZeroDivisionError):
        bucket.call("read", lambda client: 1 // 0)


def test_keys_are_never_shown() -> None:
    path = remote()
    shown = (KEYS, path, path.bucket, Store(path), path.bucket.config)
    for text in map(repr, shown):
        for key in (KEYS.access_key, KEYS.secret_key, str(KEYS.session_token)):
            assert key not in text


def test_a_spool_takes_turns_and_lets_a_large_shard_in_alone() -> None:
    spool, order, waiting = Spool(10), [], []
    hold = [threading.Event() for _ in range(4)]

    def take(number: int, size: int) -> None:
        with spool.room(size, waiting.append):
            order.append(number)
            hold[number].wait(10)

    with ThreadPoolExecutor(4) as threads:
        for number, size in enumerate([6, 25, 3, 4]):
            threads.submit(take, number, size)
            expected = number
            wait_for(lambda: len(order) + sum(waiting) == expected + 1)  # noqa: B023 - used at once
        assert order == [0]
        assert sum(waiting) == 3  # 3 would fit, and does not overtake 25
        hold[0].set()
        wait_for(lambda: order == [0, 1])
        assert spool.used == 25
        hold[1].set()
        wait_for(lambda: len(order) == 4)
        assert sorted(order[2:]) == [2, 3]
        for event in hold:
            event.set()
    assert (spool.used, sum(waiting)) == (0, 0)


def test_a_shard_that_failed_gives_its_room_back() -> None:
    spool = Spool(10)
    with pytest.raises(ZeroDivisionError), spool.room(10):
        raise ZeroDivisionError
    assert spool.used == 0
