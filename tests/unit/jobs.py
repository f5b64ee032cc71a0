"""A small extraction through the whole core, with the stand-in for the server."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.config import ExtractConfig, parse_config
from tasks.dataset.rows import read_planned
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.preflight import Preflight, open_output, run_preflight
from tasks.server.launch import AttachedServer
from tasks.storage import as_location
from tasks.storage.bucket import CredentialsSource
from tasks.store.bucket_lock import writer_lock
from tasks.store.layout import Store
from tasks.verification import Verified, verify_store
from tests.unit.helpers import CAPTURED, HIDDEN, VOCAB, Answer, FakeSGLang, write_jsonl

ROWS = 6  # of 3 tokens each, two a batch
TOKEN_BYTES = 3 * HIDDEN * 2 + 5


@dataclass
class Job:
    """An extraction whose server is the stand-in."""

    config: ExtractConfig
    fake: FakeSGLang
    tried: list[int] = field(default_factory=list)
    """The rows that the last run asked the server for."""
    credentials: CredentialsSource | None = None

    @property
    def store(self) -> Store:
        return Store(as_location(self.config.output.path, self.config.s3, self.credentials))

    def preflight(self, **options: bool) -> Preflight:
        return run_preflight(self.config, credentials=self.credentials, **options)

    def run(self, answers: dict[int, list[Answer]] | None = None, batches: int = 9, **options: bool) -> None:
        """Preflight and extract `batches` of the batches that have something to do; no verification."""
        self.fake.answers, self.fake.rids = {row: list(some) for row, some in (answers or {}).items()}, []
        preflight = self.preflight(**options)
        server = AttachedServer(self.fake.url, self.fake.staging)
        with (
            writer_lock(preflight.store) as lock,
            PrefillEngine([server], preflight.captured, self.config.extraction, 1 << 20) as engine,
        ):
            open_output(preflight)
            for batch, numbers in list(preflight.missing.items())[:batches]:
                rows = list(read_planned(self.config.dataset.path, preflight.plan, numbers, VOCAB))
                extract_batch(batch, rows, engine, preflight.store, preflight.fingerprint, lock)
        self.tried = sorted({int(rid.split("-")[2]) for rid in self.fake.rids})

    def verify(self, max_failed_share: float = 0.0) -> Verified:
        return verify_store(self.store, self.config.dataset.path, max_failed_share)

    def contents(self) -> dict[str, bytes]:
        """Every shard's bytes: rows of a batch arrive in any order, so a batch here has rows of one length only."""
        return {path.name: path.read_bytes() for path in self.store.shards.glob("*.safetensors")}


def make_job(folder: Path, fake: FakeSGLang, output: str, **sections: dict[str, Any]) -> Job:
    """A job over a model and a dataset in `folder`; `sections` add to its config."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    shape = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(shape))
    save_file({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, model / "model.safetensors")
    dataset = write_jsonl(folder / "dataset.jsonl", [{"input_ids": [row, 1, 2]} for row in range(ROWS)])
    values: dict[str, Any] = {
        "name": "test",
        "dataset": {"path": str(dataset), "max_seq_len": 8},
        "model": {"path": str(model)},
        "capture": {"layers": CAPTURED.layers},
        "server": {"device": "cpu"},
        "staging": {"path": str(fake.staging)},
        "output": {"path": output, "shard_bytes": 2 * 3 * TOKEN_BYTES},
        # One at a time, so that the rows of a shard lie in it in one order.
        "extraction": {"attempts": 2, "requests_in_flight": 1},
        **sections,
    }
    return Job(parse_config(values, "test"), fake)
