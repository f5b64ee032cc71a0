"""What a machine's parts can do, each alone: the limits that a benchmark's figures are read against."""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

MATRIX = 8192  # bf16 product of square matrices of this size
BLOCK = 1 << 28  # bytes: written at a time; copied from the device at a time
COPIES, PRODUCTS = 16, 20


def measure_limits(memory: Path, disk: Path, device: str, file_bytes: int) -> dict[str, float]:
    """bf16 rate, device to pinned host memory, writing `file_bytes` to both folders, until they are durable."""
    limits = {}
    if device == "cuda":
        one, other = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(one)
        seconds = _on_device(lambda: torch.mm(one, other, out=product), PRODUCTS)
        limits["bf16, TFLOP/s"] = 2 * MATRIX**3 / seconds / 1e12
        source = torch.empty(BLOCK, dtype=torch.uint8, device=device)
        target = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        seconds = _on_device(lambda: target.copy_(source, non_blocking=True), COPIES)
        limits["device to host, GB/s"] = BLOCK / seconds / 1e9
        del one, other, product, source, target
        torch.cuda.empty_cache()
    for threads in (1, 4):
        seconds = fill(memory, threads, file_bytes)
        limits[f"shared memory, {threads} threads, GB/s"] = file_bytes / seconds / 1e9
    seconds = fill(disk, 4, file_bytes)
    limits["disk, 4 threads and fsync, GB/s"] = file_bytes / seconds / 1e9
    return limits


def fill(folder: Path, threads: int, total_bytes: int) -> float:
    """Write so many bytes into `folder` from several threads, durable at the end, and delete them. Returns seconds."""
    folder = folder / "fill"
    folder.mkdir(parents=True)
    block = memoryview(os.urandom(1 << 20) * (BLOCK >> 20))

    def write(number: int) -> None:
        left = total_bytes // threads
        with (folder / str(number)).open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(block[:left])
            os.fsync(file.fileno())

    try:
        started = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(threads)))
        return time.monotonic() - started
    finally:
        shutil.rmtree(folder)


def _on_device(work: Callable[[], object], times: int) -> float:
    """Seconds of one, after a warm-up."""
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / times
