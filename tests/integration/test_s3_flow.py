"""The whole command into a bucket: killed in the middle of a part, resumed over a network that fails, with keys from a
Prefect block, verified.

Real: the flow as a process, Prefect, MLflow, the S3 server. Stood in for: SGLang (tests/benchmarks/pretend_server.py).
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from safetensors.numpy import load

from flows.places import BLOCK_TYPE
from tasks.config import S3Config
from tasks.storage import as_location
from tasks.storage.bucket import Credentials
from tasks.store.layout import Store
from tasks.store.manifest import check_contents
from tasks.store.record import read_records
from tests.benchmarks.pretend_server import LAYERS, VOCABULARY, serving, write_checkpoint
from tests.conftest import ROOT
from tests.faults.drill import Service, prefect_service, wait_until
from tests.integration.faulty_proxy import Fault, FaultyProxy, spoiling
from tests.integration.seaweed import KEY, SECRET, Seaweed
from tests.unit.helpers import write_jsonl

ROWS, TOKENS = 300, 480
SHARD = 10 << 20  # two shards, each sent in three parts
PART = "partNumber="
BLOCK = "the-bucket"


@dataclass
class Scene:
    """What all runs share."""

    folder: Path
    config: dict[str, Any]
    prefect: Service

    def run(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """`python -m flows ...`, with no AWS settings but those given."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MLFLOW_"))}
        home = {"DRILLCORE_HOME": str(self.folder / "home"), "HOME": str(self.folder)}
        api = {"PREFECT_API_URL": f"{self.prefect.url}/api"}
        return subprocess.Popen(
            [sys.executable, "-m", "flows", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean | home | api | environment,
            cwd=ROOT,
        )

    def succeed(self, *arguments: str, **environment: str) -> str:
        with self.run(*arguments, **environment) as process:
            text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
        return text

    def write_config(self, name: str, output: str, **s3: object) -> str:
        path = self.folder / f"{name}.yaml"
        values = self.config | {"output": {"path": output, "shard_bytes": SHARD}, "s3": s3}
        path.write_text(yaml.safe_dump(values))
        return str(path)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("flow")
    random = np.random.default_rng(0)
    # The stand-in's states are those of single tokens, and no two rows may end in the same one.
    rows = [{"input_ids": [*random.integers(0, VOCABULARY, TOKENS - 1).tolist(), row]} for row in range(ROWS)]
    dataset = write_jsonl(folder / "dataset.jsonl", rows)
    write_checkpoint(folder / "model")
    prefect = prefect_service(folder / "prefect")
    with tempfile.TemporaryDirectory(prefix="drillcore-test-", dir="/dev/shm") as memory:
        staging = Path(memory, "staging")
        with serving("tests.benchmarks.pretend_server", str(folder / "model"), str(staging)) as (url, _):
            config = {
                "name": "to-a-bucket",
                "dataset": {"path": str(dataset), "max_seq_len": 512},
                "model": {"path": str(folder / "model")},
                "capture": {"layers": LAYERS},
                "server": {"mode": "attached", "url": url, "dtype": "float32"},
                "staging": {"path": str(staging)},
            }
            try:
                prefect.start()
                yield Scene(folder, config, prefect)
            finally:
                prefect.stop()


def make_block(api: str) -> None:
    """An AWS Credentials block, as Prefect's page makes it: the server knows the type."""
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        kind = client.read_block_type_by_slug(BLOCK_TYPE)
        schema = client.get_most_recent_block_schema_for_block_type(kind.id)
        assert schema is not None
        data = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        client.create_block_document(
            BlockDocumentCreate(name=BLOCK, data=data, block_type_id=kind.id, block_schema_id=schema.id)
        )


def rows_of(store: Store) -> dict[str, bytes]:
    """The bytes of every tensor, by its name: rows come into a shard in any order."""
    found = {}
    for record in read_records(store):
        tensors = load((store.shards / str(record.file)).read_bytes())
        found |= {name: tensor.tobytes() for name, tensor in tensors.items()}
    return found


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_in_mid_part_is_resumed_and_holds_what_a_local_one_does(
    scene: Scene, s3: Seaweed, proxy: FaultyProxy
) -> None:
    uri = s3.place()
    prefix = uri.split("/", 3)[3]
    client = s3.client()
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    def unfinished() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.list_multipart_uploads(Bucket="hidden-states").get("Uploads", [])
        return [one for one in found if one["Key"].startswith(prefix)]

    proxy.rate = 2e6  # bytes a second
    settings = {"endpoint_url": proxy.url, "part_bytes": 5 << 20, "uploads": 1}
    config = scene.write_config("bucket", uri, **settings)
    with scene.run("extract", config, **keys) as process:
        wait_until(lambda: proxy.seen("PUT .*partNumber=2") > 0 or process.poll() is not None, 120, "a second part")
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert unfinished(), "the run was killed too early or too late for this test"
    root = as_location(uri, S3Config(endpoint_url=s3.url), lambda: Credentials(KEY, SECRET))
    assert read_records(Store(root)) == []

    make_block(f"{scene.prefect.url}/api")
    proxy.rate, began = None, len(proxy.requests)
    config = scene.write_config("bucket", uri, **settings, credentials_block=BLOCK)
    faults = [
        Fault("answer", "PUT", PART, count=3),
        Fault("drop", "PUT", PART, after=1 << 20),
        Fault("corrupt", "PUT", PART),
        Fault("lose", "POST", "uploadId"),
        Fault("answer", "PUT", r"\.json", status=500, code="InternalError"),
        Fault("cut", "GET", r"\.safetensors", after=1 << 20),
    ]
    with spoiling(proxy, *faults):
        printed = scene.succeed("extract", config)
    assert [fault.met for fault in faults] == [fault.count for fault in faults]
    assert "unfinished uploads of an earlier run" in printed
    assert f"output     {uri}" in printed
    assert unfinished() == []
    assert len(proxy.requests) > began

    local = scene.folder / "local"
    scene.succeed("extract", scene.write_config("local", str(local)))
    assert rows_of(Store(root)) == rows_of(Store(local))
    assert sum(len(record.rows) for record in read_records(Store(root))) == ROWS
    check_contents(Store(root), deep=True)

    place = [uri, "--endpoint-url", s3.url]
    assert "passed" in scene.succeed("verify", *place, **keys)
    assert "passed" in scene.succeed("verify", uri, AWS_ENDPOINT_URL_S3=s3.url, **keys)
    check_contents(Store(root))
    run = next(line.split()[-1] for line in printed.splitlines() if "MLflow run" in line)
    assert run in scene.succeed("record", *place, "--credentials-block", BLOCK)
    assert "300 rows are there already" in scene.succeed("plan", config)

    everything = [path for path in scene.folder.rglob("*") if path.is_file() and "prefect" not in path.parts]
    assert len(everything) > 20
    for path in everything:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in printed
    database = b"".join(path.read_bytes() for path in (scene.folder / "prefect").glob("prefect.db*"))
    assert SECRET.encode() not in database  # a block's secrets lie there encrypted
    stored = client.list_objects_v2(Bucket="hidden-states", Prefix=prefix)["Contents"]
    small = [one["Key"] for one in stored if not one["Key"].endswith((".safetensors", "/"))]
    for key in small:
        assert SECRET.encode() not in client.get_object(Bucket="hidden-states", Key=key)["Body"].read(), key
