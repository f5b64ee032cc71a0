"""One bucket: a boto3 client, calls that are tried again while a fault may pass, and errors that say what to do.

botocore tries each request a few times within seconds. Around that, every call here is tried for PATIENCE seconds: a
store that throttles (503 SlowDown), fails (500), hangs or drops connections for a minute costs a run nothing but that
minute. Expired credentials are looked up anew at each try, so that somebody may renew them meanwhile.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.errors import RemoteError

if TYPE_CHECKING:  # a trainer that reads a store has none of these
    import tenacity

    from tasks.config import S3Config

PATIENCE = 180.0  # seconds for which a call that may succeed is tried again
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0  # seconds between two tries
CONNECT_TIMEOUT, READ_TIMEOUT = 10, 60  # seconds
REQUESTS = 32  # small objects that are read at once, and connections beside the uploads'
QUIET = 10.0  # seconds between two warnings about calls that are tried again
DEFAULT_REGION = "us-east-1"  # for a store of one's own that has none

MAY_PASS = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "503", "429"),
    *("InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "500", "502", "504"),
    *("BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest", "IncompleteBody", "ConditionalRequestConflict"),
}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
MISSING = {"NoSuchKey", "404", "NotFound"}
ADVICE = {
    "NoSuchBucket": "the bucket does not exist: create it, or name another one",
    "AccessDenied": "the credentials do not allow it: see 'To a bucket' in README.md for what a run needs",
    "InvalidAccessKeyId": "the access key is not known there: check the credentials and s3.endpoint_url",
    "SignatureDoesNotMatch": "the secret key is wrong: check the credentials",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    **dict.fromkeys(EXPIRED, "the credentials have expired: renew them"),
}

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credentials:
    """Keys for a store; never shown, logged or kept."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None


CredentialsSource = Callable[[], Credentials]


class PreconditionError(Exception):
    """A conditional write was refused: the object is not as the condition wants it."""


class Bucket:
    """A bucket's name and how to reach it; opening one connects to nothing. For any number of threads and processes.

    A process that was forked, or was sent one, connects anew: what the others have open is theirs.
    """

    def __init__(self, name: str, config: "S3Config", credentials: CredentialsSource | None = None):
        self.name, self.config, self.credentials = name, config, credentials
        self.patience = PATIENCE
        self.retries = 0
        """Calls that were tried again, beyond botocore's own tries."""
        self._begin()

    def _begin(self) -> None:
        """With no connection and no thread."""
        self._lock = threading.Lock()
        self._client: Any = None
        self._next_warning = 0.0
        self._contents: dict[tuple[str, str], bytes] = {}
        for threads in ("pool", "uploads"):
            self.__dict__.pop(threads, None)
        _BUCKETS.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("name", "config", "credentials", "patience", "retries")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"Bucket({self.name!r})"

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """For requests about many small objects."""
        return ThreadPoolExecutor(REQUESTS, thread_name_prefix="s3")

    @cached_property
    def uploads(self) -> ThreadPoolExecutor:
        """For the parts of uploads, of all shards together."""
        return ThreadPoolExecutor(self.config.uploads, thread_name_prefix="s3-upload")

    def call(self, what: str, function: Callable[[Any], Result]) -> Result:
        """`function(client)`, tried again while that may help. what: is done, for the error, as 'read s3://b/k'.

        Raises FileNotFoundError if the object is missing, PreconditionError if a condition does not hold, RemoteError
        that says what to do otherwise.
        """
        import tenacity

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
            stop=tenacity.stop_after_delay(self.patience),
            before_sleep=lambda state: self._before_next_try(what, state),
            reraise=True,
        )
        try:
            return retrying(lambda: function(self.client()))
        except Exception as error:
            raise _translated(error, what, self) from error

    def client(self) -> Any:
        """The boto3 client, made on first use."""
        with self._lock:
            if self._client is None:
                self._client = _connect(self.config, self.credentials)
            return self._client

    def list(self, prefix: str, delimiter: str = "") -> Iterator[dict[str, Any]]:
        """The objects (`Key`, `Size`, `ETag`, `LastModified`) and, with a delimiter, folders (`Prefix`)."""
        token: dict[str, str] = {}
        while True:
            arguments = {"Bucket": self.name, "Prefix": prefix, "Delimiter": delimiter, **token}
            page = self.call(
                f"list s3://{self.name}/{prefix}",
                lambda client: client.list_objects_v2(**arguments),  # noqa: B023 - called at once
            )
            yield from page.get("Contents", [])
            yield from page.get("CommonPrefixes", [])
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def read(self, key: str, etag: str | None = None) -> tuple[bytes, str]:
        """A small object and its ETag; one with this ETag that was read before is not read again."""
        if etag is not None and (kept := self._contents.get((key, etag))) is not None:
            return kept, etag
        data, found = self.call(f"read s3://{self.name}/{key}", lambda client: _body(client, self.name, key))
        if etag is not None:
            self._contents[key, found] = data
        return data, found

    def read_range(self, key: str, start: int, size: int) -> bytes:
        """`size` bytes from `start` on; fewer where the object ends before."""
        if size <= 0:
            return b""
        limits = f"bytes={start}-{start + size - 1}"
        what = f"read {size} bytes at {start} of s3://{self.name}/{key}"
        return self.call(what, lambda client: _body(client, self.name, key, Range=limits)[0])

    def _before_next_try(self, what: str, state: "tenacity.RetryCallState") -> None:
        error = state.outcome.exception() if state.outcome else None
        with self._lock:
            self.retries += 1
            if code_of(error) in EXPIRED:
                self._client = None
            if time.monotonic() < self._next_warning:
                return
            self._next_warning = time.monotonic() + QUIET
        logger.warning("%s: trying again to %s", _reason(error), what)


_BUCKETS: "weakref.WeakSet[Bucket]" = weakref.WeakSet()


def _after_fork() -> None:
    for bucket in list(_BUCKETS):
        bucket._begin()


os.register_at_fork(after_in_child=_after_fork)


def _connect(config: "S3Config", credentials: CredentialsSource | None) -> Any:
    import boto3  # takes a second, and a local store needs none
    from botocore.config import Config

    keys = credentials() if credentials else None
    session = boto3.session.Session(
        aws_access_key_id=keys.access_key if keys else None,
        aws_secret_access_key=keys.secret_key if keys else None,
        aws_session_token=keys.session_token if keys else None,
        region_name=config.region or (keys.region if keys else None),
        profile_name=None if keys else config.profile,
    )
    required = {} if config.checksum != "md5" else {"request_checksum_calculation": "when_required"}
    # A part's checksum is a signed header, so the body need not be hashed a second time for the signature.
    style: dict[str, Any] = {"payload_signing_enabled": False}
    if config.addressing_style != "auto":
        style["addressing_style"] = config.addressing_style
    return session.client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=session.region_name or DEFAULT_REGION,
        config=Config(
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=READ_TIMEOUT,
            retries={"mode": "standard", "total_max_attempts": 3},
            max_pool_connections=config.uploads + REQUESTS + 16,
            tcp_keepalive=True,
            s3=style,
            # What is read has checksums of its own; some stores answer ranges with that of the whole.
            response_checksum_validation="when_required",
            **required,
        ),
    )


def _body(client: Any, bucket: str, key: str, **arguments: Any) -> tuple[bytes, str]:
    answer = whole(client.get_object(Bucket=bucket, Key=key, **arguments))
    with answer["Body"] as body:
        return body.read(), answer["ETag"]


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer about an object, unless the connection was lost among its headers: that is no error to urllib3."""
    if "ETag" not in answer or "ContentLength" not in answer:
        raise ConnectionError("the connection was closed before the answer's headers were all there")
    return answer


def code_of(error: BaseException | None) -> str:
    """The store's own word for an error; '' for one that is none of the store's."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _may_pass(error: BaseException) -> bool:
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return code_of(error) in MAY_PASS | EXPIRED or status >= 500
    dropped = (
        *(exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError),
        *(exceptions.ResponseStreamingError, HTTPError, ConnectionError, TimeoutError),
    )
    return isinstance(error, dropped) and not isinstance(error, exceptions.SSLError)


def _translated(error: Exception, what: str, bucket: Bucket) -> Exception:
    from botocore import exceptions

    code = code_of(error)
    if code in MISSING:
        return FileNotFoundError(2, "No such object", what)
    if code in ("PreconditionFailed", "412"):
        return PreconditionError(what)
    if isinstance(error, (exceptions.BotoCoreError, exceptions.ClientError)) or _may_pass(error):
        advice = ADVICE.get(code) or ADVICE.get({"403": "AccessDenied"}.get(code, ""))
        if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
            advice = "give some: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or s3.credentials_block"
        tried = f" (tried for {bucket.patience:.0f} s)" if _may_pass(error) else ""
        return RemoteError(f"Could not {what}: {_reason(error)}{tried}{f'; {advice}' if advice else ''}.", code)
    return error


def _reason(error: BaseException | None) -> str:
    if code := code_of(error):
        message = str(getattr(error, "response", {}).get("Error", {}).get("Message", ""))
        return f"{code} {message}".strip().rstrip(".")
    return f"{type(error).__name__}: {error}".rstrip(".")
