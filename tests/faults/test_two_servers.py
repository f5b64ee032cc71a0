"""Two real servers, one flow: both work, and one that is killed in mid-run costs no row."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.store.layout import Store
from tasks.store.record import read_records
from tasks.store.runs import read_runs
from tasks.verification import read_manifest
from tests.conftest import ROOT
from tests.faults.drill import make_rows
from tests.integration.serving import CPU_ARGUMENTS, config_text, cpu_config
from tests.integration.tiny_models import VOCABULARY, make_checkpoint
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]

ROWS, LONGEST = 400, 900


def test_two_servers_share_the_rows_and_one_may_die(staging: Path, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    config = cpu_config(
        tmp_path / "model",
        write_jsonl(tmp_path / "dataset.jsonl", make_rows(VOCABULARY, ROWS, LONGEST)),
        tmp_path / "output",
        staging,
        server={"dtype": "float32", "chunked_prefill_size": 256, "arguments": CPU_ARGUMENTS, "count": 2},
        capture={"layers": [0, 2, 4]},
        output={"shard_bytes": 16 << 20},
        extraction={"requests_in_flight": 16},
    )
    path = tmp_path / "config.yaml"
    path.write_text(config_text(config))
    environment = os.environ | {"DRILLCORE_HOME": str(tmp_path / "home"), "NO_COLOR": "1"}
    store = Store(config.output.path)
    command = [sys.executable, "-m", "flows", "extract", str(path)]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        while len(list(store.shards.glob("[0-9]*.json"))) < 2:
            assert run.poll() is None, run.stderr and run.stderr.read()
            time.sleep(0.05)
        (first, second) = sorted(staging.glob("server-*"))
        working = {folder: len(list(folder.glob("drillcore-*"))) for folder in (first, second)}
        (ready,) = first.glob("ready.*.json")
        psutil.Process(int(ready.name.split(".")[1])).kill()
        _, errors = run.communicate(timeout=900)
    assert run.returncode == 0, errors
    assert all(working.values()), f"a server had nothing to do: {working}"
    assert "is lost" in errors
    assert read_manifest(store)["rows_by_state"] == {"done": ROWS, "truncated": 0, "skipped": 0, "failed": 0}
    assert sorted(row.row for record in read_records(store) for row in record.rows) == list(range(ROWS))
    (figures,) = read_runs(store)
    assert figures["restarts"] == 1
    assert 0 < figures["usage"]["lost"] < 0.5
    assert figures["usage"]["full"] > 0.3
    assert list(staging.glob("server-*")) == []
