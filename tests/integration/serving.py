"""A real SGLang server on this CPU, and the extraction's core on top of it, for tests."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tasks.config import ExtractConfig, parse_config
from tasks.dataset.rows import Row, read_planned
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.preflight import Preflight, open_output, run_preflight, staging_limit
from tasks.server.facts import ServerFacts, check_server
from tasks.server.launch import ManagedServer
from tasks.store.bucket_lock import writer_lock
from tasks.store.layout import Store
from tasks.store.record import read_records
from tasks.store.shard import AUX, LAST, tensor_name
from tasks.store.tensors import open_shard

CPU_ARGUMENTS = ["--max-total-tokens", "32768", "--mem-fraction-static", "0.5"]


def cpu_config(
    model: Path, dataset: Path, output_path: Path, staging_path: Path, **sections: dict[str, Any]
) -> ExtractConfig:
    """A config for a server on this machine; `sections` add to it or change it."""
    values: dict[str, Any] = {
        "name": "test",
        "dataset": {"path": str(dataset), "max_seq_len": 2048},
        "model": {"path": str(model)},
        "server": {
            "device": "cpu",
            "dtype": "bfloat16",
            "chunked_prefill_size": 512,
            "arguments": CPU_ARGUMENTS,
            "start_timeout": 240,
        },
        "staging": {"path": str(staging_path)},
        "output": {"path": str(output_path), "shard_bytes": 16 << 20},
        "extraction": {"tokens_in_flight": 16384, "slowest_tokens_per_second": 20},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return parse_config(values, "of the test")


def config_text(config: ExtractConfig) -> str:
    """What a config file with these values holds."""
    return yaml.safe_dump(json.loads(config.model_dump_json()))


@dataclass
class Serving:
    """A server that is up, and what the preflight found."""

    preflight: Preflight
    server: ManagedServer
    facts: ServerFacts

    def rows(self) -> list[Row]:
        """All rows of the dataset."""
        preflight = self.preflight
        numbers = [row for rows in preflight.missing.values() for row in rows]
        path = preflight.config.dataset.path
        return list(read_planned(path, preflight.plan, numbers, preflight.model.vocab_size))

    @contextlib.contextmanager
    def engine(self, **limits: int) -> Iterator[PrefillEngine]:
        """An engine with the config's limits, or others."""
        config = self.preflight.config
        settings = config.extraction.model_copy(update=limits)
        with PrefillEngine([self.server], self.preflight.captured, settings, staging_limit(config)) as engine:
            yield engine

    def extract(self, output: Path | str, **limits: int) -> Store:
        """Extract every row into a store at `output`, a directory or s3://."""
        config = self.preflight.config
        config = config.model_copy(update={"output": config.output.model_copy(update={"path": output})})
        preflight = run_preflight(config)
        with writer_lock(preflight.store) as lock, self.engine(**limits) as engine:
            open_output(preflight)
            rows = {row.number: row for row in self.rows()}
            for batch, numbers in preflight.missing.items():
                chosen = [rows[number] for number in numbers]
                result = extract_batch(batch, chosen, engine, preflight.store, preflight.fingerprint, lock)
                assert result.failed == []
        return preflight.store


@contextlib.contextmanager
def serving(config: ExtractConfig, log: Path) -> Iterator[Serving]:
    """Start the server that the config asks for; end it afterwards."""
    preflight = run_preflight(config)
    assert preflight.installation is not None
    server = ManagedServer(config, preflight.installation, preflight.layers, log)
    try:
        server.start()
        yield Serving(
            preflight, server, check_server(server, config, preflight.model, preflight.layers, preflight.plan.longest)
        )
    finally:
        server.stop()


def stored_states(store: Store) -> Iterator[tuple[int, torch.Tensor]]:
    """(row, float32 [layers + 1, tokens, hidden]) of every row of a store."""
    for record in read_records(store):
        with open_shard(store.shards / str(record.file)) as shard:
            for row in record.rows:
                aux, last = (shard.get_tensor(tensor_name(row.row, name)).float() for name in (AUX, LAST))
                yield row.row, torch.stack([*aux.unflatten(-1, (-1, last.shape[-1])).unbind(1), last])
