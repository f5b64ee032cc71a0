"""Proves that the plugin fits an SGLang that the manifest does not list: a server of it has to pass the probe."""

import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tasks.config import ExtractConfig
from tasks.extraction.engine import PrefillEngine
from tasks.model import Model, capture_layers, read_model
from tasks.patching.fingerprint import fingerprints
from tasks.patching.installation import Installation
from tasks.patching.manifest import load_manifest
from tasks.patching.plugin import CAPTURE, plugin_hashes, plugin_version
from tasks.patching.proofs import Proof, write_proof
from tasks.preflight import staging_limit
from tasks.probe import ProbeReport, probe
from tasks.server.dumps import Captured
from tasks.server.facts import check_server
from tasks.server.launch import ManagedServer
from tasks.state import state_home


def prove(config: ExtractConfig, installation: Installation, installed: bool) -> Proof:
    """Serve the config's model by the installation, probe it, and keep the proof.

    installed: the plugin is to be loaded from the environment and not from PYTHONPATH. Neither dataset nor output of
    the config is looked at. Raises ServerError or ProbeError if the combination does not work, SetupError or ModelError
    if it could not be tried.
    """
    model = read_model(config.model.path)
    # What is on trial is read before the trial: minutes pass, and files may be edited meanwhile.
    functions, plugin, files = fingerprints(installation.root, load_manifest()), plugin_version(), plugin_hashes()
    report = _probe_server(config, installation, model, installed)
    proof = Proof(
        sglang=installation.sglang,
        functions=functions,
        plugin=plugin,
        plugin_files=files,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model.architecture,
        probe=asdict(report),
    )
    write_proof(proof)
    return proof


def server_log() -> Path:
    """The log of the server that the last proof was tried with."""
    return state_home() / "patch-server.log"


def _probe_server(config: ExtractConfig, installation: Installation, model: Model, installed: bool) -> ProbeReport:
    layers = capture_layers(model, config.capture)
    captured = Captured(layers, config.capture.final_norm, config.server.dtype, model.hidden_size)
    server = ManagedServer(config, installation, layers, server_log())
    if installed:
        paths = server.environment["PYTHONPATH"].split(os.pathsep)
        server.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != str(CAPTURE))
    try:
        server.start()
        facts = check_server(server, config, model, layers, longest=0)
        with PrefillEngine([server], captured, config.extraction, staging_limit(config)) as engine:
            return probe(engine, model, facts, config.dataset.max_seq_len)
    finally:
        server.stop()
