"""A real SGLang server's states in a bucket: the same as in a directory, and verified there against the server."""

from pathlib import Path

import pytest
import torch

from tasks.config import VerifyConfig
from tasks.storage import S3Path
from tasks.verification import verify_store
from tests.faults.drill import make_rows
from tests.integration.faulty_proxy import Fault, FaultyProxy, spoiling
from tests.integration.seaweed import KEY, SECRET, Seaweed
from tests.integration.serving import cpu_config, serving, stored_states
from tests.integration.tiny_models import VOCABULARY, make_checkpoint
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_states_of_a_real_server_reach_a_bucket_through_a_bad_network(
    s3: Seaweed, proxy: FaultyProxy, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "DRILLCORE_HOME": str(tmp_path / "home"),
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL_S3": proxy.url,
    }.items():
        monkeypatch.setenv(name, value)
    make_checkpoint("llama", tmp_path / "model")
    dataset = write_jsonl(tmp_path / "dataset.jsonl", make_rows(VOCABULARY, 40))
    config = cpu_config(
        *(tmp_path / "model", dataset, tmp_path / "unused", staging),
        server={"dtype": "float32", "chunked_prefill_size": 256},
        capture={"layers": [0, 2, 4]},
        output={"shard_bytes": 6 << 20},
        s3={"part_bytes": 5 << 20},
    )
    faults = [
        Fault("answer", "PUT", "safetensors", count=5),
        Fault("drop", "PUT", "safetensors", count=3, after=1 << 20),
        Fault("lose", "PUT", r"\.json", count=3),
    ]
    with serving(config, tmp_path / "server.log") as running:
        local = dict(stored_states(running.extract(tmp_path / "local")))
        with spoiling(proxy, *faults):
            store = running.extract(s3.place())
        assert isinstance(store.root, S3Path)
        assert all(fault.met == fault.count for fault in faults)
        with running.engine() as engine:
            verified = verify_store(store, dataset, 0.0, VerifyConfig(), engine)
    assert verified.rows["done"] == len(local) == 40
    assert verified.reextracted >= 8
    assert verified.shards > 1
    for row, states in stored_states(store):
        error, size = (torch.linalg.vector_norm(value, dim=(1, 2)) for value in (states - local[row], local[row]))
        assert (error / size).max() < 1e-4, f"row {row}"
