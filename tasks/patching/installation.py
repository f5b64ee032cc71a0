"""Which SGLang an interpreter has, and whether the plugin fits it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import SetupError
from tasks.patching.fingerprint import fingerprints, signature_of
from tasks.patching.manifest import NEW_LINE, Manifest, load_manifest, supported_versions
from tasks.patching.proofs import Proof, find_proof

# A package's metadata and place are known without importing it.
DESCRIBE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
versions = [found.version for found in importlib.metadata.distributions(name="sglang")]
print(json.dumps({"version": versions[0], "root": list(spec.submodule_search_locations)[0]}
    if spec and versions else None))
"""
PROVE = "or prove it on this machine: `python -m flows patch apply --force CONFIG.yaml`"


@dataclass(frozen=True)
class Installation:
    """An interpreter with an SGLang."""

    interpreter: str
    sglang: str
    root: Path
    """The sglang package's folder."""


def ask(interpreter: str, program: str) -> Any:
    """Run a program in an interpreter, which leaves no bytecode behind; returns the JSON that it prints last.

    Raises SetupError naming the interpreter.
    """
    command = [interpreter, "-B", "-c", program]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"The interpreter {interpreter} cannot be run: {error} (server.interpreter).") from error
    if answer.returncode:
        raise SetupError(f"The interpreter {interpreter} failed (server.interpreter): {answer.stderr.strip()[-500:]}")
    try:
        return json.loads(answer.stdout.splitlines()[-1])  # a sitecustomize may print too
    except (IndexError, ValueError) as error:
        raise SetupError(f"{interpreter} is no Python: it printed {answer.stdout!r} (server.interpreter).") from error


def describe_installation(interpreter: str | None) -> Installation:
    """Ask the interpreter (default: this one) which SGLang it has, whatever its version.

    Raises SetupError: no such interpreter, no SGLang in it.
    """
    interpreter = interpreter or sys.executable
    found = ask(interpreter, DESCRIBE)
    if found is None:
        raise SetupError(
            f"The interpreter {interpreter} has no SGLang. Install one of {', '.join(supported_versions())} there, or "
            "name the Python that has it (server.interpreter)."
        )
    return Installation(interpreter, found["version"], Path(found["root"]))


def find_installation(interpreter: str | None) -> Installation:
    """The interpreter's SGLang, if its version may be used.

    Raises SetupError as `describe_installation`, and for a version that neither manifest nor proof knows.
    """
    installation = describe_installation(interpreter)
    if installation.sglang not in supported_versions():
        check_signatures(installation)
    return installation


def check_signatures(installation: Installation) -> Proof | None:
    """Check that the functions that the plugin depends on are the ones that it was checked against.

    Returns the proof that this rests on, None where the manifest has it. Raises SetupError naming version and
    functions.
    """
    manifest = load_manifest()
    found = fingerprints(installation.root, manifest)
    listed = manifest.sglang.get(installation.sglang)
    if found == listed:
        return None
    proof = find_proof(installation.sglang, found)
    if proof is None:
        raise SetupError(
            _not_listed(installation, manifest) if listed is None else _changed(installation, manifest, listed, found)
        )
    return proof


def _not_listed(installation: Installation, manifest: Manifest) -> str:
    return (
        f"SGLang {installation.sglang} of {installation.interpreter} is not supported: the capture plugin is checked "
        f"against {', '.join(manifest.sglang)} (patches/manifest.json). Install one of these, name another "
        f"interpreter (server.interpreter), add a line to the manifest ({NEW_LINE}), {PROVE}."
    )


def _changed(
    installation: Installation, manifest: Manifest, listed: dict[str, str | None], found: dict[str, str | None]
) -> str:
    differences = []
    for name in manifest.functions:
        if found[name] == listed[name]:
            continue
        if found[name] is None:
            differences.append(f"{name} is missing")
        elif name in manifest.signatures:
            differences.append(f"{name} takes ({signature_of(installation.root, name)})")
        else:
            differences.append(f"the source of {name} differs" if listed[name] else f"{name} was added")
    return (
        f"SGLang {installation.sglang} in {installation.root} is not the published one: {', '.join(differences)}. "
        f"Captured values could differ in silence. Install it anew, {PROVE}."
    )
