"""How fast conversations are prepared, and in how much memory: `prepare_dataset` on a file of generated conversations.

Conversations of 2 to 8 messages of words from a fixed list, a tenth of them with a system prompt; the tokenizer is that
of the demo's model. Each run is a process of its own; its memory is that of it and its workers together, sampled.

    python -m tests.benchmarks.prepare --conversations 100000 --out prepare.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from deployments import demo
from tasks.dataset.prepare.run import prepare_dataset
from tasks.dataset.prepare.settings import PrepareConfig

WORDS = (demo.ROOT / demo.CONVERSATIONS).read_text(encoding="utf-8").split()
MAX_SEQ_LEN = 2048
SAMPLE_EVERY = 0.2  # seconds


def write_conversations(path: Path, count: int) -> None:
    """JSON lines of OpenAI messages; of a hundred, one is there twice."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            messages = [{"role": "system", "content": "Be brief."}] if random.random() < 0.1 else []
            for turn in range(2 * int(random.integers(1, 5))):
                length = min(int(random.exponential(60 if turn % 2 else 25)) + 1, 800)
                text = " ".join(WORDS[at] for at in random.integers(0, len(WORDS), length))
                messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
            line = json.dumps({"id": f"talk-{number}", "messages": messages}, ensure_ascii=False) + "\n"
            file.write(line)
            if number % 100 == 99:
                file.write(line)


class Memory:
    """The most memory that this process and its children had at once, in bytes: private and shared pages by share."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        here = psutil.Process()
        while not self._stop.wait(SAMPLE_EVERY):
            total = 0
            for process in [here, *here.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def measure(source: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """One run, in this process."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        config = PrepareConfig(
            sources=[source],
            tokenizer=tokenizer,
            output=Path(folder) / "dataset.jsonl",
            max_seq_len=MAX_SEQ_LEN,
            workers=workers,
        )
        begun: list[float] = []
        started = time.perf_counter()
        with Memory() as memory:
            manifest = prepare_dataset(config, lambda progress: begun or begun.append(time.perf_counter()))
        ended = time.perf_counter()
    times = os.times()
    return {
        "workers": workers,
        "seconds": round(ended - started, 2),
        "seconds_until_first_block": round(begun[0] - started, 2),
        "processor_seconds": round(times.user + times.system + times.children_user + times.children_system, 2),
        "peak_bytes": memory.peak,
        **{name: manifest[name] for name in ("read", "rows", "tokens", "loss_tokens", "truncated", "dropped", "bytes")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, action="append", help="several times (default: 10000 and 100000)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument("--tokenizer", type=Path, default=demo.ROOT / demo.MODEL, help="default: the demo's model")
    parser.add_argument("--out", type=Path, help="write the raw figures there")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        print(json.dumps(measure(options.file, options.tokenizer.resolve(), options.workers)))
        return
    results = []
    for count in options.conversations or [10_000, 100_000]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "talks.jsonl"
            write_conversations(path, count)
            command = [sys.executable, "-m", "tests.benchmarks.prepare", "--file", str(path)]
            command += ["--workers", str(options.workers), "--tokenizer", str(options.tokenizer)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            result = json.loads(done.stdout) | {"source_bytes": path.stat().st_size}
        results.append(result)
        print(
            f"{result['read']:,} conversations, {result['tokens']:,} tokens in {result['seconds']:.1f} s: "
            f"{result['read'] / result['seconds']:,.0f} conversations/s, {result['tokens'] / result['seconds']:,.0f} "
            f"tokens/s with {result['workers']} workers; {result['peak_bytes'] / 1e6:,.0f} MB at most, all processes"
        )
    if options.out:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        }
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
