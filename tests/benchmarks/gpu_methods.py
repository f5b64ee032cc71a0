"""Ways to get hidden states out of one model on one card, each timed from its first row to its last.

The rows are the same for all. Methods that take one row at a time do as many as fit `SERIAL_SECONDS`.
"""

import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter, TaskRunFilterName
from prefect.client.schemas.sorting import FlowRunSort
from safetensors.torch import load_file

from tasks.files import write_json
from tasks.probe import NOISE_LIMIT, relative_errors
from tasks.server.launch import ManagedServer
from tasks.store.layout import Store
from tasks.store.runs import read_runs
from tasks.verification import read_manifest
from tasks.verification.reextract import read_comparison
from tests.benchmarks.gpu_server import check_no_error, prefill_all, request_body
from tests.benchmarks.gpu_shapes import Shape
from tests.integration.serving import stored_states

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 8192
SERIAL_SECONDS = 8.0
COMPARED_ROWS, COMPARED_TOKENS = 8, 2048  # rows compared with Transformers, each at most so long
STEPS = ("preflight", "server", "probe", "verify", "record")
LOOK = 0.001  # seconds between looks for a dump
GRACE = 20.0  # seconds that a flow has to end


@dataclass
class Bench:
    """What the methods share."""

    shape: Shape
    model: Path
    dataset: Path
    prompts: list[list[int]]
    bare: ManagedServer
    ours: list[ManagedServer]
    memory: Path
    """A folder in shared memory."""
    disk: Path
    """A folder on the disk to measure."""
    log: Path
    """What the flows print is added here."""
    settings: dict[str, dict[str, Any]]
    """Sections of the flow's config that differ from its defaults."""
    time_left: Callable[[], float]
    """Seconds until everything must have ended."""
    samples: dict[int, torch.Tensor] = field(default_factory=dict)
    """Some rows of the first store: float32 [layers + 1, tokens, hidden]."""

    def tokens(self) -> int:
        return sum(map(len, self.prompts))


def prefill_bare(bench: Bench, number: int) -> dict[str, Any]:
    """(a) Nothing is captured."""
    seconds, _ = prefill_all(bench.bare.url, f"bare{number}", bench.prompts)
    return {"tokens": bench.tokens(), "seconds": seconds}


def capture_only(bench: Bench, number: int) -> dict[str, Any]:
    """Dumps into shared memory, deleted as soon as they are seen: what the plugin costs, without the store."""
    server = bench.ours[0]
    seconds, _ = prefill_all(server.url, f"capture{number}", bench.prompts, server.staging)
    return {"tokens": bench.tokens(), "seconds": seconds}


def flow_to_memory(bench: Bench, number: int) -> dict[str, Any]:
    """(b) `python -m flows extract`, from one server."""
    return _flow(bench, bench.memory / "store", bench.ours[:1])


def flow_to_disk(bench: Bench, number: int) -> dict[str, Any]:
    """(b) The same, to the disk."""
    return _flow(bench, bench.disk / "store", bench.ours[:1])


def flow_from_all(bench: Bench, number: int) -> dict[str, Any]:
    """(b) The same to shared memory, from all servers: there must be several."""
    return _flow(bench, bench.memory / "store", bench.ours)


def _flow(bench: Bench, output: Path, servers: list[ManagedServer]) -> dict[str, Any]:
    """The whole flow, on servers that run already: preflight, probe, extraction, verification, record.

    `seconds`: from the first row to the last commit record, as the flow itself counts. `command_seconds`: of all of it.
    """
    config = output.with_name("extract.json")  # JSON is YAML
    values = {
        "name": "benchmark",
        "dataset": {"path": str(bench.dataset), "max_seq_len": LONGEST},
        "model": {"path": str(bench.model)},
        "server": {"mode": "attached", "url": [server.url for server in servers]},
        "staging": {"path": str(_attach(bench, servers))},
        "output": {"path": str(output)},
    }
    values = {name: value | bench.settings.get(name, {}) if isinstance(value, dict) else value
              for name, value in (bench.settings | values).items()}  # fmt: skip
    write_json(config, values)
    store, refused = Store(output), None
    try:
        started = time.monotonic()
        try:
            _run([sys.executable, "-m", "flows", "extract", str(config)], bench)
        except RuntimeError as error:
            if not read_runs(store):  # nothing was extracted to the end
                raise
            refused = str(error)
        command_seconds = time.monotonic() - started
        run = read_runs(store)[-1]
        figures = {
            "tokens": run["tokens"],
            "seconds": run["seconds"],
            "command_seconds": command_seconds,
            "step_seconds": _step_seconds(),
            "servers": len(servers),
            "usage": run["usage"],
            "retries": run["retries"],
            "verified": refused is None,
        }
        if not bench.samples:
            bench.samples = _samples(store)
        if refused:
            return figures | {"refused": refused}
        manifest = read_manifest(store)
        comparison = read_comparison(store, manifest["records_sha256"])
        assert comparison is not None  # there is no manifest without it
        return figures | {
            "bytes": manifest["bytes"],
            "shards": manifest["shards"],
            "rows_by_state": manifest["rows_by_state"],
            "rows extracted again": len(comparison.rows),
            "largest difference": comparison.largest_difference,
        }
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _step_seconds() -> dict[str, float]:
    """What each step of the last flow run took, as the Prefect server wrote it down."""
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)
        steps = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
            task_run_filter=TaskRunFilter(name=TaskRunFilterName(any_=list(STEPS))),
        )
    return {step.name: step.total_run_time.total_seconds() for step in steps}


def _samples(store: Store) -> dict[int, torch.Tensor]:
    short = ((row, states) for row, states in stored_states(store) if states.shape[1] <= COMPARED_TOKENS)
    return dict(itertools.islice(short, COMPARED_ROWS))


def _attach(bench: Bench, servers: list[ManagedServer]) -> Path:
    """The staging path that an attached extraction of these servers is to be given."""
    if len(servers) == 1:
        return servers[0].staging
    folder = bench.memory / "attached"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, server in enumerate(servers):
        (folder / f"attached-{number}").symlink_to(server.staging)
    return folder


def _run(command: list[str], bench: Bench) -> None:
    """Run to the end or until the time is up; raises RuntimeError with the end of what it printed."""
    with bench.log.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = process.wait(max(1.0, bench.time_left()))
        except subprocess.TimeoutExpired:
            code = "no time left"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    if code:
        text = bench.log.read_bytes()[start:].decode(errors="replace")
        raise RuntimeError(f"the flow ended with {code}: {text[-1500:]}")


def _one_at_a_time(prompts: Iterable[list[int]], save: Callable[[int, list[int]], None]) -> dict[str, Any]:
    started, tokens, rows = time.monotonic(), 0, 0
    for row, ids in enumerate(prompts):
        save(row, ids)
        tokens, rows = tokens + len(ids), rows + 1
        if time.monotonic() - started > SERIAL_SECONDS:
            break
    return {"tokens": tokens, "seconds": time.monotonic() - started, "rows": rows}


def serial(bench: Bench, number: int) -> dict[str, Any]:
    """(c) The reference's way: one request, wait for its dump, load it, `torch.save`. To shared memory."""
    server, output = bench.ours[0], bench.memory / "serial"
    output.mkdir()

    with httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client:

        def save(row: int, ids: list[int]) -> None:
            request = f"drillcore-serial{number}-{row}-0-{len(ids)}"
            headers = {"content-type": "application/json"}
            client.post("/generate", content=request_body(request, ids), headers=headers).raise_for_status()
            dump = server.staging / f"{request}.safetensors"
            while not dump.exists():
                check_no_error(dump)
                time.sleep(LOOK)
            torch.save(load_file(dump), output / f"{row}.pt")
            dump.unlink()

        try:
            return _one_at_a_time(bench.prompts, save)
        finally:
            shutil.rmtree(output)


class Transformers:
    """(d) Hugging Face Transformers on the same card: a forward with `output_hidden_states`, `torch.save`."""

    def __init__(self, model: Path, device: str, layers: list[int]):
        from transformers import AutoModelForCausalLM

        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map=device)
        self.model, self.device, self.layers = lm.model, device, layers  # without the output projection: less to do

    @torch.inference_mode()
    def states(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [tokens, layers * hidden] and the final state after the norm [tokens, hidden], on the device."""
        output = self.model(torch.tensor([ids], device=self.device), output_hidden_states=True, use_cache=False)
        aux = torch.cat([output.hidden_states[layer + 1][0] for layer in self.layers], dim=-1)
        return aux, output.last_hidden_state[0]

    def run(self, bench: Bench, number: int) -> dict[str, Any]:
        output = bench.memory / "transformers"
        output.mkdir()

        def save(row: int, ids: list[int]) -> None:
            aux, last = self.states(ids)
            saved = {"input_ids": torch.tensor(ids), "aux_hidden_states": aux.cpu(), "last_hidden_state": last.cpu()}
            torch.save(saved, output / f"{row}.pt")

        try:
            return _one_at_a_time(bench.prompts, save)
        finally:
            shutil.rmtree(output)

    def compare(self, bench: Bench) -> dict[str, Any]:
        """How far stored states are from these: relative error (L2) over a row's state.

        Two bfloat16 implementations round differently; the limit is that of two prefills of one prompt.
        """
        errors: list[float] = []
        for row, stored in bench.samples.items():
            aux, last = self.states(bench.prompts[row])
            theirs = torch.stack([*aux.unflatten(-1, (len(self.layers), -1)).unbind(1), last]).float().cpu()
            errors += relative_errors(theirs, stored)
        limit = NOISE_LIMIT["bfloat16"]
        return {
            "rows": len(bench.samples),
            "states": len(errors),
            "median relative error": statistics.median(errors),
            "largest relative error": max(errors),
            "limit": limit,
            "within": max(errors) <= limit,
        }
