"""Disks that fill up in mid-run, and have room again, or not."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.steps import RETRY_DELAYS
from tasks.storage.spool import SPARE
from tasks.store.layout import Store
from tests.faults.drill import Ballast, Site, hashes, small_disk, wait_for_commits, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]

OUTPUT_BYTES = SPARE + (96 << 20)  # what preflight asks for, and a little more


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", OUTPUT_BYTES) as path:
        yield path


def test_an_output_that_is_full_for_a_while_is_waited_for(site: Site, tmp_path: Path, disk: Path) -> None:
    store, ballast = Store(disk / "output"), Ballast(disk)
    config = site.write_config(store.root)
    run = site.flows("extract", config)
    wait_for_commits(run, store, 2)
    ballast.fill()
    wait_until(lambda: "No space left on device" in run.err, 60, f"the full disk; the run said {run.err}")
    assert f"It is tried again in {RETRY_DELAYS[0]:.0f} s (1 of {len(RETRY_DELAYS)})." in run.err
    ballast.free()
    assert run.wait() == 0, run.err
    print(f"{run.seconds:.1f} s")
    site.assert_complete(store)


def test_an_output_that_stays_full_ends_the_run_with_advice(site: Site, tmp_path: Path, disk: Path) -> None:
    store, ballast = Store(disk / "output"), Ballast(disk)
    config = site.write_config(store.root)
    run = site.flows("extract", config)
    wait_for_commits(run, store, 2)
    ballast.fill()
    filled = time.monotonic()
    assert run.wait() == 1
    print(f"ended {time.monotonic() - filled:.1f} s after the disk was full:\n{run.err}")
    assert f"WriteError: {store.root} cannot be written: No space left on device" in run.err
    assert "What was committed stays: make room, and start the same command again." in run.err
    assert "Traceback" not in run.err
    kept = hashes(store)
    ballast.free()
    again = site.flows("extract", config)
    assert again.wait() == 0, again.err
    site.assert_complete(store)
    assert {name: digest for name, digest in hashes(store).items() if name in kept} == kept


def test_a_staging_that_is_full_for_a_while_costs_retries(site: Site, tmp_path: Path) -> None:
    if site.staging_bytes is None:
        pytest.skip("no file system can be mounted here, so the staging has none of its own")
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    ballast = Ballast(site.running.server.staging)
    run = site.flows("extract", config)
    wait_for_commits(run, store, 2)
    ballast.fill()
    time.sleep(2)
    ballast.free()
    freed = time.monotonic()
    assert run.wait() == 0, run.err
    print(f"ended {time.monotonic() - freed:.1f} s after the staging was freed\n{run.err}")
    site.assert_complete(store)
    assert "No space left on device" in site.running.server.log.read_text()
