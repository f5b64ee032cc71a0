"""A stand-in for an SGLang server that captures, at memory speed, in a process of its own: what is left is our time.

Its model is a table: a token's states are random numbers of its own, the final one by a factor that follows from all
tokens so far, the next token the one that the head makes most likely. So every check of the extraction holds, the
probe's, the verification's and the second extraction's too. It answers as a server with
the plugin does: settings, READY file, dumps. Left out: everything that a real server does with a prompt.

    python -m tests.benchmarks.pretend_server CHECKPOINT STAGING    # prints its port, ends when its input closes
    python -m tests.benchmarks.pretend_server CHECKPOINT STAGING 0.2    # the same, and each prompt takes 0.2 s
"""

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import torch
from safetensors.torch import save_file

from tasks.processes import start_of
from tasks.tensors import ITEM_BYTES

LAYERS, HIDDEN, VOCABULARY, CONTEXT = [1, 2, 3], 8, 1000, 4096
CHUNK = 64  # tokens: the least that a probe can be made with
SETTINGS = {
    "version": "0.5.23",
    "disable_radix_cache": True,
    "allow_auto_truncate": False,
    "dp_size": 1,
    "max_req_input_len": CONTEXT,
    "chunked_prefill_size": CHUNK,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "json_model_override_args": "{}",
}
END_OF_HEAD = b"\r\n\r\n"


def tables() -> tuple[np.ndarray, np.ndarray]:
    """States [layers + 1, vocabulary, hidden] and head [vocabulary, hidden], float32."""
    random = np.random.default_rng(20)
    states = random.standard_normal((len(LAYERS) + 1, VOCABULARY, HIDDEN), dtype=np.float32)
    return states, random.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32)


def write_checkpoint(folder: Path) -> None:
    """What the extraction reads of a checkpoint: config, embedding and head."""
    folder.mkdir()
    config = {
        "architectures": ["PretendForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    states, head = map(torch.from_numpy, tables())
    weights = {"model.embed_tokens.weight": states[0].clone(), "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors")


class PretendModel:
    """Writes dumps into `staging` as the plugin does."""

    def __init__(self, staging: Path):
        self.staging = staging
        states, self.head = tables()
        self.final = states[-1]
        self.aux = np.ascontiguousarray(states[:-1].transpose(1, 0, 2).reshape(VOCABULARY, -1))
        self.squares = np.square(states[:-1], dtype=np.float64).sum(axis=-1)  # [layers, vocabulary]
        self.next = (self.final @ self.head.T).argmax(axis=1)
        self.keys = np.random.default_rng(21).integers(1 << 63, size=VOCABULARY, dtype=np.uint64)
        self.odd = np.arange(1, 2 * CONTEXT, 2, dtype=np.uint64)

    def final_states(self, ids: np.ndarray) -> np.ndarray:
        """float32 [tokens, hidden]: no two prompts share the last one, and the head's choice is the table's."""
        so_far = np.cumsum(self.keys[ids] * self.odd[: len(ids)])  # wraps around: a hash of the prompt up to here
        so_far = (so_far ^ (so_far >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        whole, half = 1 + (so_far >> np.uint64(40)) / 2**24, 1 + (so_far % np.uint64(1 << 24)) / 2**34
        states = self.final[ids] * whole.astype(np.float32)[:, None]
        states[:, : HIDDEN // 2] *= half.astype(np.float32)[:, None]  # by a thousandth: 13 bits more
        return states

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /generate."""
        ids = np.array(body["input_ids"], dtype=np.int32)
        if "rid" in body and not body.get("return_logprob"):
            self.write_dump(body["rid"], ids)
        meta: dict[str, Any] = {"id": body.get("rid"), "prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            tops = [[[-1.0, token, None]] for token in self.next[ids].tolist()]
            meta |= {"input_top_logprobs": [None, *tops[:-1]], "output_top_logprobs": tops[-1:]}
        return {"text": "", "output_ids": [], "meta_info": meta}

    def states_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """aux [tokens, layers * hidden], last [tokens, hidden], float32; RMS of each state."""
        final = self.final_states(ids)
        squares = [*self.squares[:, ids].sum(axis=1), np.square(final).sum(dtype=np.float64)]
        return self.aux[ids], final, np.sqrt(np.array(squares) / (len(ids) * HIDDEN)).tolist()

    def write_dump(self, rid: str, ids: np.ndarray) -> None:
        aux, last, rms = self.states_of(ids)
        none = [0] * len(rms)
        metadata = {
            "request": rid,
            "layers": LAYERS,
            "final_norm": "post",
            "chunks": -(-len(ids) // CHUNK),
            "rms": rms,
            "zero_rows": none,
            "nonfinite_rows": none,
        }
        head = head_of(metadata, entries(len(ids), len(LAYERS) * HIDDEN, HIDDEN, "F32"))
        path = self.staging / f"{rid}.safetensors"
        unfinished = f"{path}.part"
        with open(unfinished, "wb") as file:
            file.writelines([head, aux, last, ids])
        os.rename(unfinished, path)


def head_of(metadata: dict[str, Any], tensors: dict[str, Any], size: int = 0) -> bytes:
    """A dump up to its data; of `size` bytes, where that is given."""
    header = orjson.dumps({"__metadata__": {"drillcore": orjson.dumps(metadata).decode()}, **tensors})
    header = header.ljust(size - 8 if size else -(-len(header) // 8) * 8)
    return struct.pack("<Q", len(header)) + header


@lru_cache(CONTEXT)
def entries(tokens: int, aux: int, last: int, dtype: str) -> dict[str, Any]:
    """A dump's tensors, as its header has them; aux, last: values a token."""
    tensors, end = {}, 0
    for name, kind, shape in (
        ("aux_hidden_states", dtype, [tokens, aux]),
        ("last_hidden_state", dtype, [tokens, last]),
        ("input_ids", "I32", [tokens]),
    ):
        start, end = end, end + ITEM_BYTES[kind] * int(np.prod(shape))
        tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    return tensors


class Connection(asyncio.Protocol):
    """HTTP/1.1, as far as the extraction speaks it."""

    def __init__(
        self, generate: Callable[[dict[str, Any]], dict[str, Any]], settings: dict[str, Any], delay: float = 0.0
    ):
        """generate: what is answered to POST /generate, given its body, after `delay` seconds; settings: to everything
        else."""
        self.generate, self.settings, self.delay, self.received = generate, settings, delay, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(END_OF_HEAD)) >= 0:
            head, begin = self.received[:end].lower(), end + len(END_OF_HEAD)
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self.received) < begin + length:
                return
            body, self.received = self.received[begin : begin + length], self.received[begin + length :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post /generate"):
            self.send(self.settings)
        elif self.delay:
            asyncio.get_running_loop().call_later(self.delay, self.prefill, body)
        else:
            self.prefill(body)

    def prefill(self, body: bytes) -> None:
        self.send(self.generate(orjson.loads(body)))

    def send(self, value: dict[str, Any]) -> None:
        text = orjson.dumps(value)
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
        )


async def serve(checkpoint: Path, staging: Path, delay: float = 0.0) -> None:
    staging.mkdir(parents=True)
    ready = {
        "pid": os.getpid(),
        "started": start_of(os.getpid()),
        "plugin": "pretend",
        "layers": LAYERS,
        "final_norm": "post",
        "dtype": "float32",
        "model_layers": 6,
        "hidden_size": HIDDEN,
    }
    (staging / f"ready.{os.getpid()}.json").write_text(json.dumps(ready))
    await listen(PretendModel(staging).generate, SETTINGS | {"model_path": str(checkpoint)}, delay)


async def listen(
    generate: Callable[[dict[str, Any]], dict[str, Any]], settings: dict[str, Any], delay: float = 0.0
) -> None:
    """Print the port, then answer until the input closes; as `Connection`."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(generate, settings, delay), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # whoever started this has ended
    server.close()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a module that ends in `listen`, with arguments, in a process of its own; yields its URL and the process."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", psutil.Process(process.pid)
        finally:
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:])))
