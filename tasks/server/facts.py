"""What a running server says of itself, and the settings under which its data would be wrong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tasks.config import ExtractConfig
from tasks.errors import ServerError
from tasks.server.launch import Server


@dataclass(frozen=True)
class ServerFacts:
    """A server that may be used."""

    sglang: str
    plugin: str
    longest_prompt: int
    """Most tokens a prompt may have."""
    chunked_prefill_size: int


REFUSED = {
    "disable_radix_cache": (True, "states of a cached prefix are not computed: start it with --disable-radix-cache"),
    "speculative_algorithm": (None, "speculative decoding changes which states are captured: start it without"),
    "pp_size": (1, "with pipeline parallelism no process sees all layers: use tensor parallelism"),
    "enable_two_batch_overlap": (False, "two-batch overlap skips the capture of layers: start it without"),
    "allow_auto_truncate": (False, "prompts would be cut silently: start it without --allow-auto-truncate"),
    "disable_cuda_graph": (True, "a prefill graph overwrites captured states: start it with --disable-cuda-graph"),
}


def check_server(server: Server, config: ExtractConfig, layers: list[int], longest_row: int) -> ServerFacts:
    """Ask the server for its settings and read the plugin's READY file.

    Raises ServerError that names the setting: one that spoils data, the plugin missing or set up otherwise, another
    dtype, a prompt limit below the dataset's longest row.
    """
    try:
        response = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False)
        response.raise_for_status()
        info: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"The server at {server.url} does not tell its settings: {error}") from error
    for setting, (wanted, why) in REFUSED.items():
        if info.get(setting, wanted) not in (wanted, "" if wanted is None else wanted):
            raise ServerError(f"The server at {server.url} cannot be used: {setting} is {info[setting]!r}; {why}.")
    ready = _read_ready(server.staging)
    asked = {"layers": layers, "final_norm": config.capture.final_norm, "dtype": config.server.dtype}
    for setting, value in asked.items():
        if ready[setting] != value:
            raise ServerError(
                f"The server at {server.url} captures with {setting} = {ready[setting]!r}; the config asks for "
                f"{value!r}."
            )
    limit = int(info["max_req_input_len"]) - 1  # the server refuses a prompt as long as max_req_input_len
    if longest_row > limit:
        raise ServerError(
            f"The longest row has {longest_row} tokens, the server at {server.url} takes {limit}: lower "
            "dataset.max_seq_len, or give the server a longer --context-length."
        )
    return ServerFacts(info["version"], ready["plugin"], limit, int(info["chunked_prefill_size"]))


def _read_ready(staging: Path) -> dict[str, Any]:
    """The newest READY file whose process lives: a restarted server leaves the old one behind."""
    files = sorted(staging.glob("ready.*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        ready = json.loads(file.read_bytes())
        if Path(f"/proc/{ready['pid']}").exists():
            return ready
    raise ServerError(
        f"The server has no capture plugin at work: no READY file of a living process in {staging}. Is it the "
        "directory in the server's DRILLCORE_CAPTURE, and has its log 'Executed general plugin: drillcore_capture'?"
    )
