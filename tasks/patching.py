"""Puts the capture plugin on a server's path, after checking that this SGLang is one that it fits.

Nothing installed is touched: the plugin is found through PYTHONPATH and SGLang's own entry-point group. The signatures
of the hooked functions are read from SGLang's source, without importing it, and compared with `patches/manifest.json`.
"""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import SetupError

PATCHES = Path(__file__).resolve().parent.parent / "patches"
MANIFEST = PATCHES / "manifest.json"
DESCRIBE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
print(json.dumps(spec and {
    "version": importlib.metadata.version("sglang"), "root": list(spec.submodule_search_locations)[0]}))
"""


@dataclass(frozen=True)
class Installation:
    """An interpreter with an SGLang that the plugin fits."""

    interpreter: str
    sglang: str
    root: Path
    """The sglang package's folder."""


def find_installation(interpreter: str | None) -> Installation:
    """Ask the interpreter (default: this one) which SGLang it has.

    Raises SetupError: no such interpreter, no SGLang in it, a version that the manifest does not list.
    """
    interpreter = interpreter or sys.executable
    try:
        answer = subprocess.run([interpreter, "-c", DESCRIBE], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"The interpreter {interpreter} cannot be run: {error} (server.interpreter).") from error
    if answer.returncode:
        raise SetupError(f"The interpreter {interpreter} failed (server.interpreter): {answer.stderr.strip()[-500:]}")
    found = json.loads(answer.stdout.splitlines()[-1])  # a sitecustomize may print too
    if found is None:
        raise SetupError(
            f"The interpreter {interpreter} has no SGLang. Install one of {', '.join(supported_versions())} there, or "
            "set server.interpreter to the Python that has it."
        )
    if found["version"] not in supported_versions():
        raise SetupError(
            f"SGLang {found['version']} of {interpreter} is not supported: the capture plugin is checked against "
            f"{', '.join(supported_versions())} (patches/manifest.json). Install one of these, or set "
            "server.interpreter."
        )
    return Installation(interpreter, found["version"], Path(found["root"]))


def supported_versions() -> list[str]:
    """SGLang versions that the capture plugin is known to fit."""
    return list(_manifest()["sglang"])


def plugin_version() -> str:
    """Version of the capture plugin in `patches/`."""
    return _manifest()["plugin"]


def check_signatures(installation: Installation) -> None:
    """Raises SetupError if a hooked function is not as the manifest has it for this version."""
    for target, expected in _manifest()["sglang"][installation.sglang].items():
        actual = signature_of(installation.root, target)
        if actual != expected:
            raise SetupError(
                f"SGLang {installation.sglang} in {installation.root} is not the published one: {target} takes "
                f"({actual}), the manifest has ({expected}). Install it anew."
            )


def signature_of(root: Path, target: str) -> str | None:
    """Parameter names of `sglang.module.Class.function` below the sglang folder, by its source; None if not there."""
    *module, class_name, function_name = target.split(".")[1:]
    try:
        tree = ast.parse(root.joinpath(*module).with_suffix(".py").read_bytes())
    except OSError:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == function_name:
                    return ast.unparse(_without_annotations(function.args))
    return None


def server_paths(device: str) -> list[Path]:
    """The folders that a server needs on its PYTHONPATH: the plugin and, without a GPU, the stand-ins."""
    return [PATCHES / "capture"] + ([PATCHES / "cpu"] if device == "cpu" else [])


def capture_settings(staging: Path, layers: list[int], final_norm: str) -> dict[str, Any]:
    """The value of DRILLCORE_CAPTURE, as `patches/capture/drillcore_capture.py` reads it."""
    return {"staging": str(staging), "layers": layers, "final_norm": final_norm}


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments


def _manifest() -> Any:
    return json.loads(MANIFEST.read_bytes())
