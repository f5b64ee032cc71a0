"""`patches/manifest.json`: the SGLang versions that the plugin fits, a line each.

The file names the functions that the plugin depends on, and has their fingerprints for each version, in that order.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import SetupError
from tasks.patching.plugin import PATCHES

MANIFEST = PATCHES / "manifest.json"
NEW_LINE = "`python -m flows patch fingerprint WHEEL` prints a version's line"


@dataclass(frozen=True)
class Manifest:
    """What the plugin was checked against."""

    signatures: list[str]
    """Functions that are hooked: their parameters count."""
    sources: list[str]
    """Functions that decide what is captured: every character counts."""
    sglang: dict[str, dict[str, str | None]]
    """SGLang version -> function -> fingerprint; None: that version has no such function of its own."""

    @property
    def functions(self) -> list[str]:
        return [*self.signatures, *self.sources]


def load_manifest(path: Path | None = None) -> Manifest:
    """Read the manifest (default: `patches/manifest.json`). Raises SetupError naming the line that is wrong."""
    path = path or MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SetupError(f"The plugin's manifest {path} cannot be read: {error}.") from error
    functions = [*content["signatures"], *content["sources"]]
    for version, line in content["sglang"].items():
        if len(line) != len(functions):
            raise SetupError(
                f"{path} has {len(line)} fingerprints for SGLang {version} and names {len(functions)} functions: "
                f"{NEW_LINE}."
            )
    sglang = {version: dict(zip(functions, line, strict=True)) for version, line in content["sglang"].items()}
    return Manifest(content["signatures"], content["sources"], sglang)


def manifest_line(version: str, fingerprints: dict[str, str | None]) -> str:
    """A version as it stands in the manifest; newer versions go above older ones, so every line ends with a comma."""
    return f"    {json.dumps(version)}: {json.dumps(list(fingerprints.values()))},"


def supported_versions() -> list[str]:
    """SGLang versions that the plugin is known to fit."""
    return list(load_manifest().sglang)
