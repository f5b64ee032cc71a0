"""Right extractions are believed: 21 runs with other prompts, orders, chunk sizes, dtypes and norms, no false alarm.

Each run is probed, extracted, verified and its rows extracted again, as the flow does it. What is printed are the
largest differences that rounding made, beside their limits: those were set by what is seen here and on GPUs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from tasks.config import VerifyConfig
from tasks.preflight import run_preflight
from tasks.probe import probe
from tasks.verification import read_manifest, read_outcome, verify_store
from tests.integration.serving import Serving, cpu_config, serving
from tests.integration.tiny_models import VOCABULARY, make_checkpoint
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]

ROWS = 40
LONGEST = 900
RUNS = [(1, 1), (2, 5), (3, 128)]  # seed, requests in flight


@dataclass(frozen=True)
class Kind:
    """A server to be believed."""

    model: str
    dtype: str
    chunk: int
    final_norm: str = "post"


KINDS = [
    Kind("smollm2", "bfloat16", 512),
    Kind("smollm2", "float32", 128, "pre"),
    Kind("llama", "bfloat16", 64),
    Kind("qwen3", "float32", 1024, "pre"),
    Kind("deepseek-v3", "bfloat16", 256),
    Kind("kimi-k2.5", "float32", 96, "pre"),
    Kind("kimi-k2.5", "bfloat16", 512),
]


def make_rows(kind: Kind, conversations: list[dict[str, list[int]]], seed: int) -> list[dict[str, list[int]]]:
    """Text for the model that can read, in another order each time; for the others any ids."""
    choose = random.Random(seed)
    if kind.model == "smollm2":
        return [{name: values[:LONGEST] for name, values in row.items()} for row in choose.sample(conversations, ROWS)]
    edges = [1, 2, kind.chunk - 1, kind.chunk, kind.chunk + 1]
    lengths = edges + [choose.randint(1, LONGEST) for _ in range(ROWS - len(edges))]
    choose.shuffle(lengths)
    return [{"input_ids": [choose.randrange(VOCABULARY) for _ in range(length)]} for length in lengths]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind.model} {kind.dtype} {kind.chunk}")
def clean(
    request: pytest.FixtureRequest, demo_dataset: Path, staging: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kind, Serving, list[dict[str, list[int]]]]]:
    kind, folder = request.param, tmp_path_factory.mktemp("clean")
    conversations = [orjson.loads(line) for line in demo_dataset.read_bytes().splitlines()]
    model = folder / "model"
    if kind.model == "smollm2":
        model = request.getfixturevalue("demo_model")
    else:
        make_checkpoint(kind.model, model)
    config = cpu_config(
        model,
        write_jsonl(folder / "dataset.jsonl", make_rows(kind, conversations, 0)),
        folder / "unused",
        staging,
        server={"dtype": kind.dtype, "chunked_prefill_size": kind.chunk},
        capture={"final_norm": kind.final_norm, **({} if kind.model == "smollm2" else {"layers": [1, 3]})},
        output={"shard_bytes": 4 << 20},
    )
    with serving(config, folder / "server.log") as running:
        yield kind, running, conversations


@pytest.mark.parametrize(("seed", "in_flight"), RUNS)
def test_a_right_run_is_believed(
    clean: tuple[Kind, Serving, list[dict[str, list[int]]]], tmp_path: Path, seed: int, in_flight: int
) -> None:
    kind, running, conversations = clean
    dataset = write_jsonl(tmp_path / "dataset.jsonl", make_rows(kind, conversations, seed))
    config = running.preflight.config
    config = config.model_copy(update={"dataset": config.dataset.model_copy(update={"path": dataset})})
    run = replace(running, preflight=run_preflight(config))
    with run.engine(requests_in_flight=in_flight) as engine:
        report = probe(engine, run.preflight.model, run.facts, LONGEST, seed)
    assert report.layers is not None

    store = run.extract(tmp_path / "store", requests_in_flight=in_flight)
    with run.engine() as engine:
        verify_store(store, dataset, 0.0, VerifyConfig(reextract_rows=ROWS // 2), engine)

    assert read_manifest(store)["rows_by_state"]["done"] == ROWS
    outcome = read_outcome(store)
    assert outcome is not None
    assert outcome.comparison is not None
    names = ("row", "one token")
    for name, largest, limits in zip(names, outcome.comparison["largest"], outcome.comparison["limits"]):
        assert max(limits) < 1  # the states of other ids differ by more
        worst = max(range(len(largest)), key=lambda state: largest[state] / limits[state])
        print(f"\n  {name}: differs by {largest[worst]:.2g} at most, limit {limits[worst]:.2g}", end="")
