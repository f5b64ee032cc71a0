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
from tasks.processes import start_of
from tasks.server.launch import Server


@dataclass(frozen=True)
class ServerFacts:
    """A server that may be used."""

    sglang: str
    plugin: str
    longest_prompt: int
    """Most tokens a prompt may have."""
    chunked_prefill_size: int


# Of requests. What would make the states themselves wrong, the plugin refuses when the server starts.
REFUSED = {
    "disable_radix_cache": (True, "states of a cached prefix are not computed: start it with --disable-radix-cache"),
    "allow_auto_truncate": (False, "prompts would be cut silently: start it without --allow-auto-truncate"),
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
    for setting, (wanted, why) in REFUSED.items():
        if info.get(setting, "unknown") != wanted:
            raise ServerError(
                f"The server at {server.url} cannot be used: {setting} is {info.get(setting, 'unknown')!r}; {why}."
            )
    # Data-parallel attention counted as dp_size until SGLang 0.5.21, then as a size of its own.
    ready = _read_ready(server.staging, int(info["dp_size"]) * int(info.get("attn_dp_size") or 1))
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


def _read_ready(staging: Path, replicas: int) -> dict[str, Any]:
    """What the plugin says, the same in each data-parallel replica: one process of each writes.

    A server that was restarted leaves its old READY files behind; they are those of dead processes.
    """
    found = [json.loads(file.read_bytes()) for file in staging.glob("ready.*.json")]
    alive = [ready for ready in found if ready.pop("started") == start_of(ready.pop("pid"))]
    if not alive:
        raise ServerError(
            f"The server has no capture plugin at work: no READY file of a living process in {staging}. Is it the "
            "directory in the server's DRILLCORE_CAPTURE, and has its log 'Executed general plugin: drillcore_capture'?"
        )
    if len(alive) != replicas or any(ready != alive[0] for ready in alive):
        raise ServerError(
            f"{len(alive)} processes write into {staging}, the server has {replicas} data-parallel replicas, and one "
            f"process of each must write, with the same settings: {alive}. Give each server a staging directory of its "
            "own."
        )
    return alive[0]
