"""Which attention backend prefills fastest on this card? Bare servers, one a backend, all up at once, in turn.

Rows as `gpu_table` has them. A backend that does not start, or whose kernels are not compiled in time, is left out with
the reason. The first line of the output names the fastest one.

    python -m tests.benchmarks.gpu_backends llama-8b triton torch_native flashinfer --out backends.json
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import orjson

from tasks.config import ExtractConfig, parse_config
from tasks.files import write_json
from tasks.server.launch import ManagedServer
from tests.benchmarks.gpu_methods import LONGEST
from tests.benchmarks.gpu_server import facts, prefill_all, prepare_server, server_arguments
from tests.benchmarks.gpu_shapes import SHAPES, write_checkpoint
from tests.benchmarks.gpu_table import MEAN_TOKENS, Rows, write_dataset

WARM_UP_TOKENS = 80_000


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # an exception: servers and files go
    shape = SHAPES[options.shape]
    result: dict[str, Any] = {"shape": options.shape, "facts": facts(options.device), "tokens a second": {}}
    rates: dict[str, list[float]] = result["tokens a second"]
    result["left out"] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drillcore-benchmark-", dir="/dev/shm")))
        write_dataset(folder / "rows", Rows(options.tokens // 2353, MEAN_TOKENS), shape.config["vocab_size"])
        prompts = [orjson.loads(line)["input_ids"] for line in (folder / "rows").read_bytes().splitlines()]
        write_checkpoint(shape.config, folder / "model", options.device)
        servers = {name: _server(name, folder, options, shape.cache_tokens) for name in options.backends}
        for server in servers.values():
            stack.callback(server.stop)
        few = prompts[: 1 + WARM_UP_TOKENS * len(prompts) // sum(map(len, prompts))]

        def prepare(server: ManagedServer) -> float:
            started = time.monotonic()
            server.start()
            prefill_all(server.url, "warm", few)  # kernels compile
            return time.monotonic() - started

        threads = ThreadPoolExecutor(len(servers), thread_name_prefix="backend")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        ready = {name: threads.submit(prepare, server) for name, server in servers.items()}
        wait(ready.values(), options.ready_within)
        for name, future in ready.items():
            if not future.done():
                result["left out"][name] = f"not ready after {options.ready_within:.0f} s"
                servers.pop(name).stop()  # it compiles, and would slow the others
            elif error := future.exception():
                result["left out"][name] = f"{type(error).__name__}: {error}"[-1500:]
                servers.pop(name)
        result["ready after, s"] = {name: round(ready[name].result(), 1) for name in servers}
        for number in range(options.rounds):
            for name, server in servers.items():
                seconds, _ = prefill_all(server.url, f"round{number}", prompts)
                rates.setdefault(name, []).append(sum(map(len, prompts)) / seconds)
                write_json(options.out, result)
    write_json(options.out, result)
    print("fastest:", max(rates, key=lambda name: max(rates[name])) if rates else "none")
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode(), flush=True)


def _server(backend: str, folder: Path, options: argparse.Namespace, cache_tokens: int) -> ManagedServer:
    log = options.out.absolute().with_name(f"{options.out.stem}.{backend}.log")
    return prepare_server(_config(backend, folder, options, cache_tokens), [], log, bare=True)


def _config(backend: str, folder: Path, options: argparse.Namespace, cache_tokens: int) -> ExtractConfig:
    arguments = [*server_arguments(options.device, cache_tokens), "--attention-backend", backend]
    values = {
        "name": "backends",
        "dataset": {"path": str(folder / "rows"), "max_seq_len": LONGEST},
        "model": {"path": str(folder / "model")},
        "server": {
            "device": options.device,
            "chunked_prefill_size": options.chunk,
            "arguments": arguments,
            "start_timeout": options.ready_within,
        },
        "staging": {"path": str(folder / f"staging-{backend}")},
        "output": {"path": str(folder / "unused")},
    }
    return parse_config(values, "of the benchmark")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("backends", nargs="+", help="as --attention-backend of SGLang")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=300_000, help="of one run (default: %(default)s)")
    parser.add_argument(
        "--chunk", type=int, default=8192, help="most tokens of one forward pass (default: %(default)s)"
    )
    parser.add_argument("--ready-within", type=float, default=150.0, help="seconds (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="raw JSON; logs are written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
