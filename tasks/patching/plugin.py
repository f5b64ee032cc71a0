"""The plugin's own files, and what a server must be given to load them."""

from pathlib import Path
from typing import Any

from tasks.config import ExtractConfig
from tasks.files import sha256_of

PATCHES = Path(__file__).resolve().parents[2] / "patches"
CAPTURE = PATCHES / "capture"
CPU = PATCHES / "cpu"
ENTRY_POINTS = "entry_points.txt"


def plugin_modules() -> list[Path]:
    """The plugin's source files."""
    return sorted(CAPTURE.glob("*.py"))


def plugin_dist_info() -> Path:
    """The folder by which SGLang finds the plugin: its name, version and entry point."""
    (folder,) = CAPTURE.glob("*.dist-info")
    return folder


def plugin_version() -> str:
    """The plugin's version."""
    return plugin_dist_info().stem.rpartition("-")[2]


def plugin_hashes() -> dict[str, str]:
    """SHA-256 of each of the plugin's source files, by name."""
    return {module.name: sha256_of(module) for module in plugin_modules()}


def server_paths(device: str) -> list[Path]:
    """The folders that a server needs on its PYTHONPATH: the plugin and, without a GPU, the stand-ins."""
    return [CAPTURE, CPU] if device == "cpu" else [CAPTURE]


def capture_settings(config: ExtractConfig, staging: Path, layers: list[int]) -> dict[str, Any]:
    """The value of DRILLCORE_CAPTURE, as `patches/capture/drillcore_capture.py` reads it."""
    return {
        "staging": str(staging),
        "layers": layers,
        "final_norm": config.capture.final_norm,
        "pinned_bytes": config.staging.pinned_bytes,
    }
