"""Fingerprints of the functions that the plugin depends on, read from SGLang's source without importing it.

A hooked function counts by its signature: names, order and defaults of its parameters. A decoder loop counts by its
source text, since an edited one (some projects capture hidden states that way) gives other values in silence. Text and
not syntax tree: a tree's form changes with the Python that makes it.
"""

import ast
import hashlib
import importlib.metadata
import zipfile
from pathlib import Path

from tasks.errors import SetupError
from tasks.patching.manifest import Manifest

Folder = Path | zipfile.Path
"""The sglang package's folder, on disk or inside a wheel."""
DIGITS = 16  # of the SHA-256, hexadecimal


def fingerprints(root: Folder, manifest: Manifest) -> dict[str, str | None]:
    """Fingerprint of each of the manifest's functions, in its order; None where SGLang has no such function."""
    texts = {name: signature_of(root, name) for name in manifest.signatures}
    texts |= {name: source_of(root, name) for name in manifest.sources}
    return {name: None if text is None else _digest(text) for name, text in texts.items()}


def fingerprint_wheel(wheel: Path, manifest: Manifest) -> tuple[str, dict[str, str | None]]:
    """Version and fingerprints of an SGLang wheel.

    Raises SetupError: it is none, or it lacks a function that the plugin hooks.
    """
    found = next(iter(importlib.metadata.distributions(name="sglang", path=[str(wheel)])), None)
    if found is None or not zipfile.is_zipfile(wheel):
        raise SetupError(f"{wheel} is no SGLang wheel. `pip download --no-deps sglang==VERSION` fetches one.")
    with zipfile.ZipFile(wheel) as archive:
        line = fingerprints(zipfile.Path(archive, "sglang/"), manifest)
    for name in manifest.signatures:
        if line[name] is None:
            raise SetupError(f"SGLang {found.version} in {wheel} has no {name}: the plugin must be changed to fit it.")
    return found.version, line


def signature_of(root: Folder, target: str) -> str | None:
    """Parameters of `sglang.module.Class.function` with their defaults; None if there is no such function."""
    found = _find(root, target)
    if found is None:
        return None
    arguments = found[1].args
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(arguments)


def source_of(root: Folder, target: str) -> str | None:
    """Source of `sglang.module.Class.function` with its decorators, without white space at the ends of its lines."""
    found = _find(root, target)
    if found is None:
        return None
    text, function = found
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    # The lines that ast counts; str.splitlines knows more ends of lines.
    lines = text.split("\n")[first - 1 : function.end_lineno]
    return "\n".join(line.rstrip() for line in lines)


def _find(root: Folder, target: str) -> tuple[str, ast.FunctionDef] | None:
    """The text of the function's file, and the function in it."""
    *module, class_name, function_name = target.split(".")[1:]
    path = root / f"{'/'.join(module)}.py"
    if not path.is_file():
        return None
    try:
        text = path.read_bytes().decode()
        body = ast.parse(text).body
    except (OSError, ValueError, SyntaxError) as error:
        raise SetupError(f"{path} cannot be read: {error}. Install SGLang anew.") from error
    found = None
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == function_name:
                    found = text, function  # of two, Python takes the last one too
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
