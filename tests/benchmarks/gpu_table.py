"""One table: bare SGLang, drillcore's whole flow, and the ways of others, on one card in one run.

Two servers are up at once, one bare, one with the plugin; the methods take turns, `--rounds` times, on the same rows,
whose lengths are distributed as the reference dataset's. Weights are random. Figures are written after each method.

    python -m tests.benchmarks.gpu_table llama-8b --out llama-8b.json
    python -m tests.benchmarks.gpu_table deepseek --out deepseek.json
    python -m tests.benchmarks.gpu_report llama-8b.json deepseek.json      # as Markdown

Several GPUs: `--tensor-parallel 2` for servers that share them, `--servers 2` for one server on each.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import yaml

from flows.services import prefect_api
from tasks.config import ExtractConfig, parse_config
from tasks.files import write_json
from tests.benchmarks import gpu_methods
from tests.benchmarks.gpu_limits import fill, measure_limits
from tests.benchmarks.gpu_methods import Bench, Transformers
from tests.benchmarks.gpu_report import print_table
from tests.benchmarks.gpu_server import facts, prefill_all, prepare_server, running, server_arguments
from tests.benchmarks.gpu_shapes import SHAPES, Shape, operations, write_checkpoint
from tests.benchmarks.planning import Shape as Rows
from tests.benchmarks.planning import write_dataset

# Cut at 8,192 tokens, an exponential distribution of this mean has the reference dataset's, 2,353.
MEAN_TOKENS = 2440
WARM_UP_TOKENS = 80_000  # kernels compile
SHARD_BYTES = 512 << 20
MOST_FAILURES = 2  # of one method, before it is left out

Method = Callable[[Bench, int], dict[str, Any]]
METHODS: dict[str, Method] = {
    "bare": gpu_methods.prefill_bare,
    "capture": gpu_methods.capture_only,
    "memory": gpu_methods.flow_to_memory,
    "all": gpu_methods.flow_from_all,
    "serial": gpu_methods.serial,
    "disk": gpu_methods.flow_to_disk,
}
TRANSFORMERS = "transformers"
DEFAULT_METHODS = ["bare", "memory", "serial", TRANSFORMERS]
AFTERWARDS = ["capture", "disk"]
LOADING = 60.0  # seconds that must be left to load a model once more


class Results:
    """Raw figures, in a file that is up to date at any time."""

    def __init__(self, path: Path, head: dict[str, Any]):
        self.path = path
        self.values: dict[str, Any] = head | {"runs": [], "not run": []}

    def set(self, name: str, value: Any) -> None:
        self.values[name] = value
        self.write()

    def add(self, method: str, number: int, figures: dict[str, Any]) -> None:
        rate = figures["tokens"] / figures["seconds"]
        run = {"method": method, "round": number, "tokens_per_second": rate, **figures}
        self.values["runs"].append(run)
        self.write()
        print(f"{time.monotonic() - STARTED:5.0f} s  {method:12} {number}  {rate:10,.0f} tokens/s", flush=True)

    def leave_out(self, method: str, number: int, reason: str) -> None:
        self.values["not run"].append({"method": method, "round": number, "reason": reason})
        self.write()
        print(f"{time.monotonic() - STARTED:5.0f} s  {method:12} {number}  not run: {reason}", flush=True)

    def write(self) -> None:
        write_json(self.path, self.values)


STARTED = time.monotonic()


def main() -> int:
    options = _options()
    # However it is ended, its servers and files go: an exception unwinds all contexts.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("ended"))
    options.out = options.out.absolute()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.shape]
    head = {
        "shape": options.shape,
        "command": " ".join(["python -m tests.benchmarks.gpu_table", *sys.argv[1:]]),
        "settings": {name: value if isinstance(value, int | float | list) else str(value)
                     for name, value in vars(options).items()},
        "facts": facts(options.device),
        "bytes a token": shape.token_bytes,
        "layers": shape.layers,
    }  # fmt: skip
    results = Results(options.out, head)
    try:
        with contextlib.ExitStack() as stack:
            _measure(options, shape, results, stack)
    except Exception:
        results.set("error", traceback.format_exc())
        traceback.print_exc()
    results.set("seconds", time.monotonic() - STARTED)
    print(print_table([results.values]), flush=True)
    return 1 if "error" in results.values or not results.values["runs"] else 0


def _measure(options: argparse.Namespace, shape: Shape, results: Results, stack: contextlib.ExitStack) -> None:
    memory, disk = (
        Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drillcore-benchmark-", dir=folder)))
        for folder in (options.memory, options.disk)
    )
    os.environ["DRILLCORE_HOME"] = str(disk / "state")
    results.set("limits", measure_limits(memory, disk, options.device, int(options.limit_gib * (1 << 30))))
    prompts, dataset = _rows(shape, options.tokens or shape.tokens, disk)
    lengths = [len(ids) for ids in prompts]
    results.set("rows", {"rows": len(lengths), "tokens": sum(lengths), "longest": max(lengths)})
    results.set("operations", operations(shape.config, lengths))
    started = time.monotonic()
    write_checkpoint(shape.config, memory / "model", options.device)
    results.set("checkpoint_seconds", time.monotonic() - started)

    config = _server_config(options, shape, memory, dataset)
    logs = options.out.with_suffix("")
    ours = [
        prepare_server(config, shape.layers, logs.with_name(f"{logs.name}.server-{number}.log"), number)
        for number in range(options.servers)
    ]
    bare = prepare_server(config, shape.layers, logs.with_name(f"{logs.name}.bare.log"), bare=True)
    bench = Bench(
        *(shape, memory / "model", dataset, prompts, bare, ours, memory, disk, logs.with_name(f"{logs.name}.flow.log")),
        settings=_flow_settings(options.set),
        time_left=lambda: options.deadline - (time.monotonic() - STARTED),
    )
    beside = TRANSFORMERS in options.methods and shape.transformers_beside
    with contextlib.ExitStack() as servers:
        with ThreadPoolExecutor(1) as background:
            # A virtual machine gets its memory as it is first used: not while something is timed.
            touched = background.submit(fill, memory, 4, options.touch_gib << 30) if options.touch_gib else None
            started = time.monotonic()
            servers.enter_context(running([bare, *ours]))
            results.set("start_seconds", time.monotonic() - started)
            if touched:
                results.set("touch_seconds", touched.result())
        methods: dict[str, Method] = {name: METHODS[name] for name in options.methods if name in METHODS}
        if beside:
            model = _transformers(bench, options.device, results)
            methods[TRANSFORMERS] = model.run
        servers.enter_context(prefect_api())
        warm_up = prompts[: 1 + WARM_UP_TOKENS * len(prompts) // sum(lengths)]
        for server, staging in [(bare, None), *((one, one.staging) for one in ours)]:
            prefill_all(server.url, "warm", warm_up, staging)
        _take_turns(bench, methods, options.rounds, results)
        _take_turns(bench, _afterwards(options), options.rounds, results)
    if TRANSFORMERS in options.methods and not beside:
        if bench.time_left() < LOADING:
            results.leave_out(TRANSFORMERS, 0, "no time left")
            return
        model = _transformers(bench, options.device, results)
        _take_turns(bench, {TRANSFORMERS: model.run}, options.rounds, results)
    if TRANSFORMERS in options.methods and bench.samples:
        results.set("values against Transformers", model.compare(bench))


def _rows(shape: Shape, tokens: int, folder: Path) -> tuple[list[list[int]], Path]:
    path = folder / "dataset.jsonl"
    write_dataset(path, Rows(max(1, tokens // 2353), MEAN_TOKENS), shape.config["vocab_size"])
    return [orjson.loads(line)["input_ids"] for line in path.read_bytes().splitlines()], path


def _server_config(options: argparse.Namespace, shape: Shape, memory: Path, dataset: Path) -> ExtractConfig:
    values = {
        "name": "benchmark",
        "dataset": {"path": str(dataset), "max_seq_len": gpu_methods.LONGEST},
        "model": {"path": str(memory / "model")},
        "server": {
            "count": options.servers,
            "device": options.device,
            "tensor_parallel": options.tensor_parallel,
            "chunked_prefill_size": options.chunk,
            "arguments": [
                *server_arguments(options.device, shape.cache_tokens),
                *options.server_arguments.split(),
            ],
            "start_timeout": options.start_timeout,
        },
        "staging": {"path": str(memory / "staging"), "pinned_bytes": int(options.pinned_gib * (1 << 30))},
        "output": {"path": str(memory / "unused")},
    }
    return parse_config(values, "of the benchmark")


def _flow_settings(assignments: list[str]) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {"output": {"shard_bytes": SHARD_BYTES}}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        section, _, field = name.partition(".")
        settings.setdefault(section, {})[field] = yaml.safe_load(value)
    return settings


def _afterwards(options: argparse.Namespace) -> dict[str, Method]:
    """More methods, and the flow to shared memory with another setting each."""

    def varied(assignment: str) -> Method:
        settings = _flow_settings([*options.set, assignment])
        return lambda bench, number: gpu_methods.flow_to_memory(dataclasses.replace(bench, settings=settings), number)

    methods = {name: METHODS[name] for name in options.afterwards}
    return methods | {f"memory {assignment}": varied(assignment) for assignment in options.vary}


def _transformers(bench: Bench, device: str, results: Results) -> Transformers:
    """Load the model once more."""
    started = time.monotonic()
    model = Transformers(bench.model, device, bench.shape.layers)
    results.set("transformers_load_seconds", time.monotonic() - started)
    model.run(bench, 0)  # kernels compile; its rate rose by a third over the first two runs
    return model


def _take_turns(bench: Bench, methods: dict[str, Method], rounds: int, results: Results) -> None:
    """Each method in turn, as often as asked for, while the time lasts; one that fails again and again is left out."""
    took: dict[str, float] = {}
    failures = dict.fromkeys(methods, 0)
    for number in range(rounds):
        for name, method in methods.items():
            if bench.time_left() < took.get(name, 0.0):
                results.leave_out(name, number, "no time left")
                continue
            if failures[name] >= MOST_FAILURES:
                continue
            started = time.monotonic()
            try:
                results.add(name, number, method(bench, number))
            except Exception as error:
                failures[name] += 1
                results.leave_out(name, number, f"{type(error).__name__}: {error}")
            took[name] = time.monotonic() - started


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name: str, kind: Any, default: Any, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: %(default)s)")

    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True, help="raw JSON; logs are written beside it")
    for name, default, text in (("methods", DEFAULT_METHODS, "in turn"), ("afterwards", AFTERWARDS, "then, in turn")):
        choices = [*METHODS, *([TRANSFORMERS] if name == "methods" else [])]
        text += f" (default: {' '.join(default)})"
        parser.add_argument(f"--{name}", nargs="*", choices=choices, default=default, help=text)
    option("--rounds", int, 3, "how often each method has its turn")
    option("--deadline", float, 3600.0, "seconds from the start after which nothing new is begun")
    option("--tokens", int, None, "of one run of bare, capture and the flow; default: the shape's")
    option("--device", str, "cuda", "cuda or cpu")
    option("--chunk", int, 8192, "most tokens of one forward pass")
    option("--tensor-parallel", int, 1, "GPUs that share each server's model")
    option("--servers", int, 1, "servers with the plugin, for the method `all`")
    option("--pinned-gib", float, 4, "the plugin's pinned memory, at most")
    option("--memory", Path, Path("/dev/shm"), "shared memory: model, staging, output")
    option("--disk", Path, Path(tempfile.gettempdir()), "disk to measure: output")
    option("--touch-gib", int, 0, "memory to use once before anything is timed")
    option("--limit-gib", float, 4, "to write when the file systems are measured")
    option("--start-timeout", float, 300.0, "seconds for a server to start")
    option("--server-arguments", str, "", "further arguments for sglang.launch_server, in one string")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="of the flow's config"
    )
    parser.add_argument(
        "--vary", nargs="*", default=[], metavar="SECTION.FIELD=VALUE", help="afterwards: `memory` with each of these"
    )
    options = parser.parse_args()
    if "all" in [*options.methods, *options.afterwards] and options.servers < 2:
        parser.error("the method `all` needs --servers 2 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
