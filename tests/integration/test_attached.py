"""A server that somebody else started: used through its URL, refused when it is set up otherwise, missed when dead."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.__main__ import main
from tasks.config import ExtractConfig
from tasks.errors import ServerError
from tasks.patching import capture_settings
from tasks.preflight import run_preflight
from tasks.server.facts import check_server
from tasks.server.launch import AttachedServer
from tests.conftest import ROOT
from tests.integration.serving import Serving, config_text, cpu_config, serving

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ROWS = 6


@pytest.fixture(scope="module")
def few_rows(demo_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("few") / "dataset.jsonl"
    path.write_text("".join(demo_dataset.read_text().splitlines(keepends=True)[:ROWS]))
    return path


@pytest.fixture(scope="module")
def running(
    demo_model: Path, few_rows: Path, staging: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("attached")
    config = cpu_config(demo_model, few_rows, folder / "unused", staging)
    with serving(config, folder / "server.log") as up:
        yield up


def config_for(running: Serving, output: Path, **sections: dict[str, Any]) -> ExtractConfig:
    """A config that attaches to the server; `sections` change it."""
    config = running.preflight.config
    sections["server"] = {"mode": "attached", "url": running.server.url} | sections.get("server", {})
    return cpu_config(config.model.path, config.dataset.path, output, running.server.staging, **sections)


def write_config(config: ExtractConfig, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(config_text(config))
    return path


def test_an_attached_server_is_used_and_left_running(running: Serving, tmp_path: Path) -> None:
    config = write_config(config_for(running, tmp_path / "output"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "flows", "extract", str(config)],
        env=os.environ | {"DRILLCORE_HOME": str(tmp_path / "home"), "NO_COLOR": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{ROWS} done, 0 truncated, 0 skipped, 0 failed" in done.stdout
    running.server.check_alive()
    assert [file.name for file in running.server.staging.glob("drillcore-*")] == []


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("capture", {"layers": [2, 14, 26]}, r"layers = \[1, 14, 26\]; the config asks for \[2, 14, 26\]"),
        ("server", {"dtype": "float32"}, "dtype = 'bfloat16'; the config asks for 'float32'"),
        ("staging", {"path": "/dev/shm/drillcore-test-nobody"}, "no READY file of a living process"),
    ],
)
def test_another_setting_of_the_server_is_refused_by_name(
    running: Serving, tmp_path: Path, section: str, values: dict[str, Any], message: str
) -> None:
    preflight = run_preflight(config_for(running, tmp_path / "output", **{section: values}))
    server = AttachedServer(running.server.url, preflight.config.staging.path)
    with pytest.raises(ServerError, match=message):
        check_server(server, preflight.config, preflight.model, preflight.layers, 10)


def test_another_model_and_a_too_long_row_are_refused(running: Serving) -> None:
    preflight = running.preflight
    server = AttachedServer(running.server.url, running.server.staging)
    config, layers = preflight.config, preflight.layers
    with pytest.raises(ServerError, match="model_layers = 30; the config asks for 32"):
        check_server(server, config, replace(preflight.model, layers=32), layers, 10)
    with pytest.raises(ServerError, match="model_path"):
        check_server(server, config, replace(preflight.model, path=Path("/other")), layers, 10)
    limit = running.facts.longest_prompt
    assert check_server(server, config, preflight.model, layers, limit).longest_prompt == limit
    with pytest.raises(ServerError, match=f"longest row has {limit + 1} tokens, the server .* takes {limit}"):
        check_server(server, config, preflight.model, layers, limit + 1)


def test_the_printed_command_starts_this_server(
    running: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = running.preflight.config
    assert main(["server-command", str(write_config(config, tmp_path))]) == 0
    printed = capsys.readouterr().out
    settings = json.dumps(capture_settings(config, config.staging.path, [1, 14, 26]))
    assert f"DRILLCORE_CAPTURE='{settings}'" in printed
    command = psutil.Process(running.server.process.pid).children()[0].cmdline()
    arguments = command[command.index("-m") :]
    assert [argument for argument in arguments if argument not in printed] == [str(running.server.port)]


def test_a_server_that_dies_ends_the_run_with_its_log(running: Serving, tmp_path: Path) -> None:
    """The last test of this module: the server is gone afterwards."""
    for process in psutil.Process(running.server.process.pid).children(recursive=True):
        process.kill()
    with running.engine(attempts=2) as engine:
        (row, *_) = running.rows()
        with pytest.raises(ServerError, match=r"(?s)The server died with exit code .*ends with:\n  \| "):
            engine.submit(row.number, row.input_ids).result(timeout=120)
