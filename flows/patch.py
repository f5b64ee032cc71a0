"""The command `patch`: the capture plugin's life cycle, as lines of name and value for people.

Without an interpreter it speaks of this one, whose managed servers get the plugin through PYTHONPATH; with one, of that
environment, into which the plugin is installed.
"""

from pathlib import Path

from tasks.config import load_config
from tasks.errors import SetupError
from tasks.patching.environment import State, check_installed, find_site, inspect_site, install_plugin, remove_plugin
from tasks.patching.fingerprint import fingerprint_wheel
from tasks.patching.installation import Installation, check_signatures, describe_installation
from tasks.patching.manifest import load_manifest, manifest_line
from tasks.patching.plugin import plugin_version, server_paths
from tasks.patching.proofs import Proof, list_proofs

Lines = list[tuple[str, str]]


def apply(interpreter: str | None, force: Path | None) -> Lines:
    """Make the plugin ready for use; `force` is a config to prove with, should the manifest not know this SGLang."""
    config = load_config(force) if force else None
    installation = describe_installation(interpreter or (config.server.interpreter if config else None))
    try:
        proof = check_signatures(installation)
    except SetupError:
        if config is None:
            raise
    else:
        return _about(installation, proof) + (_install(find_site(interpreter)) if interpreter else _paths())

    from tasks.patching.prove import prove  # it takes torch and a second; most calls never come here

    site = find_site(interpreter) if interpreter else None
    was_absent = site is not None and inspect_site(site).state is State.ABSENT
    lines = _install(site) if site else _paths()
    try:
        proof = prove(config, installation, installed=site is not None)
    except BaseException:
        if site and was_absent:
            remove_plugin(site)
        raise
    return _about(installation, proof) + lines


def verify(interpreter: str | None) -> Lines:
    """Check that the plugin would work: SGLang's version and functions and, where it is installed, every byte."""
    installation = describe_installation(interpreter)
    lines = _about(installation, check_signatures(installation))
    if interpreter is None:
        return lines + _paths()
    site = find_site(interpreter)
    check_installed(interpreter, site)
    return [*lines, _plugin(f"every byte is in {site}, and the interpreter finds its entry point")]


def status(interpreter: str | None) -> Lines:
    """What there is, whatever it is."""
    proofs = list_proofs()
    site = find_site(interpreter) if interpreter else None
    try:
        installation = describe_installation(interpreter)
        lines = _about(installation, check_signatures(installation))
    except SetupError as error:
        lines = [("SGLang", str(error))]
    if site:
        found = inspect_site(site)
        strangers = f": {', '.join(map(str, found.strangers))}" if found.strangers else ""
        lines.append(_plugin(f"{found.state} in {site}{strangers}"))
    else:
        lines += _paths()
    for proof in proofs:
        lines.append(("proof", f"SGLang {proof.sglang} with plugin {proof.plugin}, {proof.text()}"))
    return lines


def revert(interpreter: str | None) -> Lines:
    """Take the plugin out of an environment again."""
    if interpreter is None:
        return [_plugin("nothing to undo: a managed server gets it through PYTHONPATH, nothing is installed")]
    site = find_site(interpreter)
    if remove_plugin(site) is State.ABSENT:
        return [_plugin(f"nothing to undo: it is not in {site}")]
    return [_plugin(f"removed from {site}, which is as before")]


def fingerprint(wheels: list[Path]) -> tuple[list[str], Lines]:
    """The manifest's line of each wheel; and the functions that no listed version has like that, to be read first."""
    manifest = load_manifest()
    text, unseen = [], []
    for wheel in wheels:
        version, line = fingerprint_wheel(wheel, manifest)
        text.append(manifest_line(version, line))
        new = [name for name in line if all(listed[name] != line[name] for listed in manifest.sglang.values())]
        if new:
            unseen.append((version, f"unlike in every listed version, so read before you list it: {', '.join(new)}"))
    return text, unseen


def _about(installation: Installation, proof: Proof | None) -> Lines:
    basis = proof.text() if proof else "as listed in patches/manifest.json"
    return [("SGLang", f"{installation.sglang} in {installation.root}, {basis}")]


def _paths() -> Lines:
    capture, cpu = server_paths("cpu")
    return [
        _plugin("goes on a server's PYTHONPATH, which a managed server is given; nothing is installed"),
        ("path", str(capture)),
        ("", f"{cpu} (only without a GPU)"),
    ]


def _install(site: Path) -> Lines:
    done = {
        State.ABSENT: f"installed into {site}",
        State.APPLIED: f"is in {site} already, nothing was changed",
        State.OUTDATED: f"replaced an older one in {site}",
        State.HALF_DONE: f"finished what was begun in {site}",
    }
    return [_plugin(done[install_plugin(site)])]


def _plugin(text: str) -> tuple[str, str]:
    return "plugin", f"version {plugin_version()}: {text}"
