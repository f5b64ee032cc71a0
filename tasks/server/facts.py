"""What a running server says of itself, and the settings under which its data would be wrong."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tasks.config import ExtractConfig
from tasks.errors import ServerError
from tasks.model import Model
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
    "prefill graph": ("disabled", "a CUDA graph overwrites captured states: start it with --disable-cuda-graph"),
}
# Server settings beyond dtype that change the values of the states, with their defaults.
NUMERICS = {"quantization": None, "kv_cache_dtype": "auto", "json_model_override_args": "{}"}


def server_info(url: str) -> dict[str, Any]:
    """A running server's own account of its settings. Raises ServerError."""
    try:
        response = httpx.get(f"{url}/server_info", timeout=60, trust_env=False)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"The server at {url} does not tell its settings: {error}") from error


def numerics_of_arguments(arguments: list[str]) -> dict[str, str | None]:
    """The NUMERICS that a managed server's arguments ask for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in NUMERICS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, default=default)
    return vars(parser.parse_known_args(arguments)[0])


def numerics_of_info(info: dict[str, Any]) -> dict[str, str | None]:
    """The NUMERICS of a running server."""
    return {name: info[name] for name in NUMERICS}


def check_server(server: Server, config: ExtractConfig, model: Model, layers: list[int], longest: int) -> ServerFacts:
    """Ask the server for its settings and read the plugin's READY file.

    longest: tokens of the dataset's longest row. Raises ServerError that names the setting: one that spoils data, the
    plugin missing or set up otherwise, another model or dtype, a prompt limit that is too low.
    """
    info = server_info(server.url)
    info["prefill graph"] = info.get("cuda_graph_config", {}).get("prefill", {}).get("backend")
    for setting, (wanted, why) in REFUSED.items():
        if info.get(setting, "unknown") != wanted:
            raise ServerError(
                f"The server at {server.url} cannot be used: {setting} is {info.get(setting, 'unknown')!r}; {why}."
            )
    ready = _read_ready(server.staging)
    asked = {
        "layers": layers,
        "final_norm": config.capture.final_norm,
        "dtype": config.server.dtype,
        "model_layers": model.layers,
        "hidden_size": model.hidden_size,
        "model_path": str(model.path.resolve()),
    }
    actual = ready | {"model_path": str(Path(info["model_path"]).resolve())}
    for setting, value in asked.items():
        if actual[setting] != value:
            raise ServerError(
                f"The server at {server.url} runs with {setting} = {actual[setting]!r}; the config asks for {value!r}."
            )
    limit = int(info["max_req_input_len"]) - 1  # the server refuses a prompt as long as max_req_input_len
    if longest > limit:
        raise ServerError(
            f"The longest row has {longest} tokens, the server at {server.url} takes {limit}: lower "
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
