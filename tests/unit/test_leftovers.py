"""What dead runs left in a staging directory is found and removed; what belongs to the living stays."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tasks.processes import identity, start_of
from tasks.server.launch import OWNER
from tasks.server.leftovers import FORGOTTEN, remove_leftovers


def server_folder(staging: Path, owner: dict[str, object]) -> Path:
    folder = staging / "server-abc"
    folder.mkdir()
    (folder / OWNER).write_text(json.dumps(owner))
    return folder


@pytest.fixture
def dead() -> dict[str, object]:
    """A process of this host that has ended."""
    return identity() | {"started": 1}


def test_a_dead_run_s_server_is_ended_and_named(tmp_path: Path, dead: dict[str, object]) -> None:
    """A stand-in for the server: no real one outlives its guardian when it is asked to."""
    folder = server_folder(tmp_path, dead)
    orphan = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    (folder / f"ready.{orphan.pid}.json").write_text(json.dumps({"pid": orphan.pid, "started": start_of(orphan.pid)}))
    (removed,) = remove_leftovers(tmp_path)
    assert orphan.wait(timeout=5) < 0
    assert removed.startswith("server-abc with processes ")
    assert str(orphan.pid) in removed
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_was_given_out_again_is_left_alone(tmp_path: Path, dead: dict[str, object]) -> None:
    folder = server_folder(tmp_path, dead)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        (folder / f"ready.{other.pid}.json").write_text(json.dumps({"pid": other.pid, "started": "1"}))
        assert remove_leftovers(tmp_path) == ["server-abc"]
        assert other.poll() is None
        other.kill()


def test_a_living_run_s_folder_stays(tmp_path: Path) -> None:
    folder = server_folder(tmp_path, identity())
    assert remove_leftovers(tmp_path) == []
    assert folder.is_dir()


@pytest.mark.parametrize("folder", [".", "attached-1"])
def test_a_dump_that_nobody_fetched_goes_after_an_hour(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    old, new = (tmp_path / folder / f"drillcore-{name}.safetensors" for name in ("old", "new"))
    for dump in (old, new):
        dump.touch()
    passed = old.stat().st_mtime - FORGOTTEN - 1
    os.utime(old, (passed, passed))
    assert remove_leftovers(tmp_path) == [old.name]
    assert new.exists()
