"""What runs here: versions of packages, the commit of this code, the machine. For the record of a run."""

import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("drillcore", "torch", "safetensors", "numpy", "pyarrow", "prefect", "mlflow", "transformers")
ROOT = Path(__file__).resolve().parents[1]
GIT_TIMEOUT = 5.0  # seconds


def describe_origin() -> dict[str, Any]:
    """`host`, `python`, `packages` by name, and `git`: the commit and whether files differ from it, or None."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": git_state(ROOT),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """`commit` and `changed` of the checkout in `folder`; None where it is no checkout or there is no git."""
    if not (folder / ".git").exists():
        return None
    commit, changes = (_git(folder, *command) for command in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return None if commit is None else {"commit": commit, "changed": bool(changes)}


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
