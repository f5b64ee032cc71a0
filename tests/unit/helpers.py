"""What several unit tests build: tiny inputs, states, stores, and a stand-in for the SGLang server."""

import importlib.util
import json
import re
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tasks.config import DatasetConfig
from tasks.dataset.plan import NO_BATCH, Plan, save_plan
from tasks.dataset.rows import read_planned
from tasks.dataset.scan import Scan, scan_dataset
from tasks.errors import DatasetError
from tasks.server.dumps import Captured
from tasks.store.layout import Store, create_store, fingerprint_of
from tasks.store.record import Record, RowRecord, record_path, write_record
from tasks.store.shard import ShardWriter, row_bytes

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 100
HIDDEN = 4
CAPTURED = Captured(layers=[1, 4], final_norm="post", dtype="bfloat16", hidden_size=HIDDEN)


def load_plugin() -> ModuleType:
    """The capture plugin, imported by its path: it belongs to the server's interpreter, not to this one."""
    spec = importlib.util.spec_from_file_location("drillcore_capture", ROOT / "patches/capture/drillcore_capture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLUGIN = load_plugin()


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    """A line each: strings as they are, everything else as JSON."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def scan(path: Path, shard_bytes: int = 1 << 20, **policies: Any) -> Scan:
    """Scan with a vocabulary of 100 ids, rows of at most 8 tokens and 10 bytes a token."""
    return scan_dataset(DatasetConfig(path=path, **({"max_seq_len": 8} | policies)), VOCAB, 10, shard_bytes)


def refusal(path: Path, **policies: Any) -> str:
    with pytest.raises(DatasetError) as refused:
        scan(path, **policies)
    return str(refused.value)


def raw(state: torch.Tensor) -> np.ndarray:
    """The state's bytes, uint8 [tokens, bytes a token]."""
    return state.contiguous().view(torch.uint8).numpy()


def random_states(seed: int, tokens: int, captured: Captured = CAPTURED) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [tokens, layers * hidden] and last [tokens, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, captured.dtype)
    width = len(captured.layers) * captured.hidden_size
    return (
        torch.randn((tokens, width), generator=generator).to(dtype),
        torch.randn((tokens, captured.hidden_size), generator=generator).to(dtype),
    )


def rms_of(aux: torch.Tensor, last: torch.Tensor) -> list[float]:
    states = [*aux.unflatten(-1, (-1, last.shape[-1])).unbind(1), last]
    return [float(state.double().square().mean().sqrt()) for state in states]


def new_store(store: Store, parts: dict[str, Any], config: dict[str, Any] | None = None) -> Store:
    """A store with its folders, ready to be written."""
    create_store(store, parts, config or {})
    store.shards.mkdir()
    store.logs.mkdir()
    return store


@dataclass
class StoredRow:
    """What a store holds of one row; tests spoil it."""

    row: int
    aux: torch.Tensor
    last: torch.Tensor
    ids: np.ndarray
    mask: np.ndarray
    rms: list[float]


@dataclass
class SmallStore:
    """A store of 7 rows in 3 batches: row 2 is cut to 6 tokens, row 4 is no JSON and skipped."""

    store: Store
    dataset: Path
    plan: Plan
    fingerprint: str

    def record_path(self, row: int) -> Path:
        return record_path(self.store, int(self.plan.batch[row]), 0)

    def shard_path(self, row: int) -> Path:
        return self.store.shard(int(self.plan.batch[row]), 0)


def seed_of(ids: np.ndarray) -> int:
    """Different prompts have different states, the same prompt always the same."""
    return zlib.crc32(ids.astype("<i4").tobytes())


def make_store(
    folder: Path,
    spoil: Callable[[StoredRow], StoredRow] = lambda row: row,
    leave_out: tuple[int, ...] = (),
    more_parts: dict[str, Any] | None = None,
    kept: dict[str, Any] | None = None,
) -> SmallStore:
    """Write a valid store; `spoil` may change any row on its way in, `leave_out` names rows that are not stored.

    more_parts: of the fingerprint; kept: what the store keeps as the extraction's.
    """
    lines: list[Any] = [
        {"id": f"sample-{row}", "input_ids": [row * 10 + at for at in range(length)], "loss_mask": mask}
        for row, (length, mask) in enumerate(
            [(3, [0, 1, 1]), (5, [0, 0, 1, 1, 1]), (9, [0] * 4 + [1] * 5), (4, None), (1, None), (2, [0, 1]), (6, None)]
        )
    ]
    lines[4] = "{no json"
    dataset = write_jsonl(folder / "dataset.jsonl", lines)
    config = DatasetConfig(path=dataset, max_seq_len=6, on_too_long="truncate", on_invalid="skip")
    token_bytes = row_bytes(1, len(CAPTURED.layers) + 1, HIDDEN, 2)
    scan = scan_dataset(config, VOCAB, token_bytes, 10 * token_bytes)
    store = Store(folder / "store")
    parts = {
        "input_sha256": scan.sha256,
        "layers": CAPTURED.layers,
        "final_norm": CAPTURED.final_norm,
        "dtype": CAPTURED.dtype,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        **(more_parts or {}),
    }
    new_store(store, parts, kept or {"name": "small"})
    save_plan(scan.plan, store.plan)
    fingerprint = fingerprint_of(parts)
    for batch, numbers in enumerate(scan.plan.rows_by_batch()):
        rows = []
        for row in read_planned(dataset, scan.plan, [number for number in numbers if number not in leave_out], VOCAB):
            aux, last = random_states(seed_of(row.input_ids), len(row.input_ids))
            rows.append(spoil(StoredRow(row.number, aux, last, row.input_ids, row.loss_mask, rms_of(aux, last))))
        write_part(store, fingerprint, batch, 0, rows)
    assert (scan.plan.batch == [0, 0, 1, 1, NO_BATCH, 2, 2]).all()
    return SmallStore(store, dataset, scan.plan, fingerprint)


def write_part(store: Store, fingerprint: str, batch: int, part: int, rows: list[StoredRow]) -> Record:
    """Commit a shard with its record."""
    path = store.shard(batch, part)
    with ShardWriter(path, len(rows), CAPTURED.dtype, {"fingerprint": fingerprint}) as writer:
        for row in rows:
            writer.add(row.row, raw(row.aux), raw(row.last), row.ids, row.mask)
        written = writer.finish()
    stored = [RowRecord(row.row, len(row.ids), row.rms, [0, 0, 0]) for row in rows]
    record = Record(fingerprint, batch, part, path.name, written.bytes, written.checksum, "raw", stored, [], {})
    write_record(store, record)
    return record


@dataclass
class Request:
    """One POST /generate: the request id, the row in it, the prompt."""

    rid: str
    row: int
    ids: np.ndarray
    staging: Path

    def write_dump(self, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] | None = None) -> Path:
        """The dump that the plugin would write; `edit` spoils its metadata or tensors first."""
        aux, last = random_states(seed_of(self.ids), len(self.ids))
        metadata: dict[str, Any] = {
            "request": self.rid,
            "layers": list(CAPTURED.layers),
            "final_norm": CAPTURED.final_norm,
            "chunks": 1,
            "rms": rms_of(aux, last),
            "zero_rows": [0] * (len(CAPTURED.layers) + 1),
            "nonfinite_rows": [0] * (len(CAPTURED.layers) + 1),
        }
        tensors = {"aux_hidden_states": aux, "last_hidden_state": last, "input_ids": torch.from_numpy(self.ids)}
        if edit:
            edit(metadata, tensors)
        path = self.staging / f"{self.rid}.safetensors"
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, {"drillcore": json.dumps(metadata)})
        return unfinished.rename(path)


Answer = Callable[[Request], tuple[int, Any] | None]
"""What the stand-in does with a request: HTTP status and JSON, or None to hang up without an answer."""


def good(request: Request) -> tuple[int, Any]:
    request.write_dump()
    return 200, {"meta_info": {"id": request.rid}}


def status(code: int, text: str = "no") -> Answer:
    return lambda request: (code, {"error": {"message": text}})


@dataclass
class FakeSGLang:
    """A fake, for faults the real server cannot be made to show: POST /generate leaves a dump in `staging`.

    `answers` has, for a row, what its tries get, one after the other; after them, and for all other rows, `good`.
    """

    staging: Path
    answers: dict[int, list[Answer]] = field(default_factory=dict)
    rids: list[str] = field(default_factory=list)
    """The ids of all requests, in the order in which they came."""
    health: Callable[[], bool] = lambda: True
    """Whether a prefill that is not the extraction's is answered."""

    def __enter__(self) -> "FakeSGLang":
        fake = self
        self.staging.mkdir(parents=True, exist_ok=True)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self.reply(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = fake.answer(body) if "rid" in body else (200, {}) if fake.health() else None
                if answer is None:
                    self.close_connection = True
                else:
                    self.reply(*answer)

            def reply(self, code: int, value: Any) -> None:
                text = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that hung up is what some tests are about."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        match = re.fullmatch(r"drillcore-[0-9a-f]+-(\d+)-\d+-\d+", body["rid"])
        assert match is not None, body["rid"]
        request = Request(body["rid"], int(match[1]), np.array(body["input_ids"], dtype=np.int32), self.staging)
        self.rids.append(request.rid)
        planned = self.answers.get(request.row, [])
        return (planned.pop(0) if planned else good)(request)

    def tries(self, row: int) -> int:
        return sum(rid.split("-")[2] == str(row) for rid in self.rids)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds; fails the test if it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)
