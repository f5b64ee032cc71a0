"""Proofs: combinations of SGLang and plugin that the manifest does not list and that a probe has passed here.

A proof holds for exactly one combination: SGLang's version, the fingerprints of its functions, the plugin's bytes.
Another byte anywhere is another combination. They lie in the state folder, a file each.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.errors import SetupError
from tasks.files import sha256_of_json, write_json
from tasks.patching.plugin import plugin_hashes
from tasks.state import state_home


@dataclass(frozen=True)
class Proof:
    """A combination and how it was proved."""

    sglang: str
    functions: dict[str, str | None]
    """Fingerprints, by function."""
    plugin: str
    """Version of the plugin."""
    plugin_files: dict[str, str]
    """SHA-256 of the plugin's files, by name."""
    at: str
    """Date and time, ISO 8601."""
    model: str
    """Class of the model that was served."""
    probe: dict[str, Any]
    """What the probe saw (`tasks.probe.ProbeReport`)."""

    def text(self) -> str:
        """For people."""
        return f"proved on {self.at[:10]} with {self.model}"


def proofs_folder() -> Path:
    """Where the proofs lie."""
    return state_home() / "patch-proofs"


def find_proof(sglang: str, functions: dict[str, str | None]) -> Proof | None:
    """The proof of an SGLang with the plugin as it is now, if there is one. Raises SetupError for a damaged one."""
    path = _path(sglang, functions, plugin_hashes())
    return _read(path) if path.exists() else None


def list_proofs() -> list[Proof]:
    """All proofs, also those of another version of the plugin. Raises SetupError for a damaged one."""
    return [_read(path) for path in sorted(proofs_folder().glob("*.json"))]


def write_proof(proof: Proof) -> Path:
    """Keep a proof; returns its file."""
    path = _path(proof.sglang, proof.functions, proof.plugin_files)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(proof))
    return path


def _path(sglang: str, functions: dict[str, str | None], plugin_files: dict[str, str]) -> Path:
    return proofs_folder() / f"{sglang}-{sha256_of_json([sglang, functions, plugin_files])[:16]}.json"


def _read(path: Path) -> Proof:
    try:
        proof = Proof(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(f"The proof {path} cannot be read: {error}. Delete it and prove again.") from error
    if _path(proof.sglang, proof.functions, proof.plugin_files) != path:
        raise SetupError(f"The proof {path} is not what its name says. Delete it and prove again.")
    return proof
