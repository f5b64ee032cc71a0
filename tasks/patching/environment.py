"""The plugin in somebody else's environment: installed as a distribution that pip lists, and removed without a trace.

What lies there is judged by content. RECORD, written before the files that it names, has the SHA-256 of each: so a half
done install is told from a changed one, and finished or undone by the next call. `entry_points.txt`, by which SGLang
finds the plugin, comes last and goes first: a half done install is never loaded.
"""

import base64
import contextlib
import csv
import enum
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import SetupError
from tasks.files import write_atomic
from tasks.patching.installation import ask
from tasks.patching.plugin import ENTRY_POINTS, plugin_dist_info, plugin_modules

NAME = "drillcore_capture"
RECORD = "RECORD"
NOTE = "drillcore.json"  # in the dist-info folder: what the environment looked like before
BYTECODE = "__pycache__"
SITE = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
SEEN = f"""
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec({NAME!r})
print(json.dumps({{
    "entry_points": [point.value for point in importlib.metadata.entry_points(group="sglang.srt.plugins")
                     if point.name == {NAME!r}],
    "module": spec and spec.origin}}))
"""


class State(enum.StrEnum):
    """Of the plugin in an environment."""

    ABSENT = "absent"
    APPLIED = "applied"
    OUTDATED = "outdated"
    """Installed by drillcore and unchanged, but not what `patches/` has now."""
    HALF_DONE = "half done"
    """An install or a removal was cut short."""
    MODIFIED = "modified"
    """Files that drillcore did not write or that were changed since."""


@dataclass(frozen=True)
class Found:
    """What an environment holds of the plugin."""

    state: State
    dist_info: Path | None
    strangers: list[Path]
    """The files that make it `modified`."""


def find_site(interpreter: str) -> Path:
    """The folder into which the interpreter's packages are installed. Raises SetupError."""
    site = Path(ask(interpreter, SITE))
    if not site.is_dir():
        raise SetupError(f"The interpreter {interpreter} installs into {site}, which is no folder.")
    return site


def inspect_site(site: Path) -> Found:
    """Look at what there is of the plugin; changes nothing."""
    folders = sorted(site.glob(f"{NAME}-*.dist-info"))
    if len(folders) > 1:
        return Found(State.MODIFIED, None, folders)
    folder = folders[0] if folders else None
    record = _read_record(folder) if folder else {}
    files = {site / name: digest for name, digest in record.items()}
    modules = [site / module.name for module in plugin_modules()]
    strangers = [path for path in modules if path.exists() and path not in files]
    if folder is None:
        return Found(State.MODIFIED if strangers else State.ABSENT, None, strangers)
    strangers += [path for path in folder.iterdir() if path not in files and not _is_remains(path)]
    if any(not _may_be_ours(name, folder) for name in record):
        strangers.append(folder / RECORD)
    strangers += [path for path, digest in files.items() if path.exists() and _digest(path.read_bytes()) != digest]
    if strangers:
        return Found(State.MODIFIED, folder, strangers)
    if not record or not all(path.exists() for path in files):
        return Found(State.HALF_DONE, folder, [])
    ours = {name: _digest(data) for name, data in _payload().items()}
    note = f"{folder.name}/{NOTE}"
    same = record == ours | {note: record.get(note)}
    return Found(State.APPLIED if same else State.OUTDATED, folder, [])


def install_plugin(site: Path) -> State:
    """Install the plugin, or replace an older one; returns the state that was found.

    What is there already is left alone. Raises SetupError: files that are not as drillcore left them, a folder that
    cannot be written.
    """
    found = _refuse_strangers(site)
    if found.state is State.APPLIED:
        return found.state
    with _writing(site):
        if found.dist_info is not None:
            _remove(site, found.dist_info)
        _write(site)
    return found.state


def remove_plugin(site: Path) -> State:
    """Remove the plugin and what running it left; returns the state that was found. Raises as `install_plugin`."""
    found = _refuse_strangers(site)
    if found.dist_info is not None:
        with _writing(site):
            _remove(site, found.dist_info)
    return found.state


def check_installed(interpreter: str, site: Path) -> None:
    """Raises SetupError unless every byte is there and the interpreter finds the plugin where it was installed."""
    found = _refuse_strangers(site)
    if found.state is not State.APPLIED:
        raise SetupError(
            f"The capture plugin in {site} is {found.state}. `python -m flows patch apply --interpreter {interpreter}` "
            "installs it."
        )
    seen = ask(interpreter, SEEN)
    module = site / plugin_modules()[0].name
    if not seen["entry_points"] or seen["module"] is None or not module.samefile(seen["module"]):
        raise SetupError(
            f"The capture plugin is installed in {site}, but the interpreter {interpreter} finds {seen['module']} and "
            f"the entry points {seen['entry_points']}. Is another one on PYTHONPATH, or are its site-packages off?"
        )


def _refuse_strangers(site: Path) -> Found:
    found = inspect_site(site)
    if found.state is State.MODIFIED:
        raise SetupError(
            f"Not as drillcore installed it, and left alone: {', '.join(map(str, found.strangers))}. Keep elsewhere "
            "what you still need of it, delete it there, and try again."
        )
    return found


def _payload() -> dict[str, bytes]:
    """What is installed, by path below the site folder, in the order in which it is written."""
    source = plugin_dist_info()
    folder = source.name
    files = {f"{folder}/INSTALLER": b"drillcore\n"}
    metadata = [path for path in sorted(source.iterdir()) if path.name != ENTRY_POINTS]
    files |= {f"{folder}/{path.name}": path.read_bytes() for path in metadata}
    files |= {module.name: module.read_bytes() for module in plugin_modules()}
    return files | {f"{folder}/{ENTRY_POINTS}": (source / ENTRY_POINTS).read_bytes()}


def _write(site: Path) -> None:
    folder = plugin_dist_info().name
    note = json.dumps({"bytecode_folder": (site / BYTECODE).is_dir()}).encode()
    files = {f"{folder}/{NOTE}": note, **_payload()}
    record = io.StringIO()
    lines = csv.writer(record, lineterminator="\n")
    lines.writerows([name, _digest(data), len(data)] for name, data in files.items())
    lines.writerow([f"{folder}/{RECORD}", "", ""])
    (site / folder).mkdir()
    for name, data in [(f"{folder}/{RECORD}", record.getvalue().encode()), *files.items()]:
        write_atomic(site / name, data)


def _remove(site: Path, folder: Path) -> None:
    """Undo `_write`, wherever it or this function was cut short."""
    (folder / ENTRY_POINTS).unlink(missing_ok=True)
    files = [site / name for name in _read_record(folder)]
    for module in [path for path in files if path.parent == site]:
        for pattern in (module.name, f".{module.name}.*.tmp", f"{BYTECODE}/{module.stem}.*.pyc*"):
            for path in site.glob(pattern):
                path.unlink()
    bytecode, note = site / BYTECODE, folder / NOTE
    if note.exists() and not json.loads(note.read_bytes())["bytecode_folder"] and bytecode.is_dir():
        with contextlib.suppress(OSError):  # others have theirs in it by now
            bytecode.rmdir()
    for path in files:
        path.unlink(missing_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _read_record(folder: Path) -> dict[str, str]:
    """Path below the site folder -> digest, without RECORD's own line; empty if there is no RECORD yet."""
    path = folder / RECORD
    if not path.exists():
        return {}
    rows = [row for row in csv.reader(path.read_text(errors="replace").splitlines()) if row]
    return {row[0]: row[1] if len(row) > 1 else "" for row in rows if row[0] != f"{folder.name}/{RECORD}"}


def _may_be_ours(name: str, folder: Path) -> bool:
    """Whether a RECORD may name this file: nothing outside the plugin's own names is ever removed."""
    parts = name.split("/")
    if len(parts) == 2:
        return parts[0] == folder.name and parts[1] not in ("", ".", "..")
    return len(parts) == 1 and name.startswith(NAME) and name.endswith(".py")


def _is_remains(path: Path) -> bool:
    """Whether a file in the dist-info folder is one that RECORD need not name."""
    return path.name == RECORD or (path.name.startswith(".") and path.suffix == ".tmp")


def _digest(data: bytes) -> str:
    """As in RECORD (packaging.python.org/en/latest/specifications/recording-installed-packages)."""
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()}"


@contextlib.contextmanager
def _writing(site: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"{error.filename or site} cannot be written: {error.strerror}. Run this as the owner of the environment; "
            "or leave the environment alone: `python -m flows server-command CONFIG.yaml` starts a server with the "
            "plugin on its PYTHONPATH."
        ) from error
