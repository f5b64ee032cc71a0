"""What all tests share: the demo's model and dataset, made once and kept in the state folder."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import flows  # noqa: F401 - sets the environment that keeps Prefect and MLflow offline
from deployments import demo

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """A checkpoint of SmolLM2-135M-Instruct in bfloat16."""
    path = ROOT / demo.MODEL
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        demo.make_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def demo_dataset(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's conversations, tokenized."""
    path = tmp_path_factory.mktemp("demo") / "dataset.jsonl"
    demo.make_dataset(demo_model, path)
    return path


@pytest.fixture(scope="module")
def staging() -> Iterator[Path]:
    """A staging directory in shared memory, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="drillcore-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
