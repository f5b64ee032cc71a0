"""One SGLang server and one Prefect server for all drills, started once, ended after the last of them."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.drill import Run, Site, make_rows, prefect_service, small_disk
from tests.integration.serving import CPU_ARGUMENTS, cpu_config, serving, stored_states
from tests.integration.tiny_models import VOCABULARY, make_checkpoint
from tests.unit.helpers import write_jsonl

STAGING_BYTES = 192 << 20


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The server's staging is a small file system of its own where one can be mounted."""
    folder = tmp_path_factory.mktemp("site")
    make_checkpoint("llama", folder / "model")
    dataset = write_jsonl(folder / "dataset.jsonl", list(make_rows(VOCABULARY)))
    with contextlib.ExitStack() as stack:
        try:
            staging, size = stack.enter_context(small_disk(folder / "staging", STAGING_BYTES)), STAGING_BYTES
        except pytest.skip.Exception:
            staging, size = Path(tempfile.mkdtemp(prefix="drillcore-test-", dir="/dev/shm")), None
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
        config = cpu_config(
            folder / "model",
            dataset,
            folder / "unused",
            staging,
            server={"dtype": "float32", "chunked_prefill_size": 256, "arguments": CPU_ARGUMENTS},
            capture={"layers": [0, 2, 4]},
            output={"shard_bytes": 32 << 20},
            extraction={"requests_in_flight": 32},
        )
        running = stack.enter_context(serving(config, folder / "server.log"))
        prefect = prefect_service(folder / "prefect")
        stack.callback(prefect.stop)
        prefect.start()
        reference = dict(stored_states(running.extract(folder / "reference")))
        yield Site(folder, running, f"{prefect.url}/api", reference, size)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    Run.end_all()
