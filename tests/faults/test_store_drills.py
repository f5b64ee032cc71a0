"""Drills on the store: a second writer, a writer that is gone for good, a shard that rots."""

import json
from pathlib import Path

import pytest

from tasks.store.layout import Store
from tests.faults.drill import ROWS, Site, committed, hashes, wait_for_commits

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_second_run_is_refused_by_the_name_of_the_first_which_goes_on(site: Site, tmp_path: Path) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    first = site.flows("extract", config)
    wait_for_commits(first, store, 2)
    second = site.flows("extract", config)
    assert second.wait() == 2
    assert first.process.poll() is None, "the first run ended too early for this drill"
    assert f"is being written by process {first.process.pid} on " in second.err
    assert first.wait() == 0, first.err
    site.assert_complete(store)


def test_a_shard_that_rots_is_named_and_its_rows_alone_are_extracted_again(site: Site, tmp_path: Path) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    assert site.flows("extract", config).wait() == 0
    before = hashes(store)
    record = committed(store)[3]
    shard = record.with_suffix(".safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))

    checked = site.flows("verify", store.root)
    assert checked.wait() == 1
    assert f"{shard.name} is damaged: checksum " in checked.err
    assert not store.manifest.exists()

    rows = len(json.loads(record.read_bytes())["rows"])
    mended = site.flows("extract", config, "--deep")
    assert mended.wait() == 0, mended.err
    assert f"{rows} rows, " in mended.out
    assert f"(resumed: {ROWS - rows} rows were there already)" in mended.out
    assert site.flows("verify", store.root).wait() == 0
    site.assert_complete(store)
    after = hashes(store)
    assert {name for name in after if after[name] != before[name]} <= {record.name, shard.name}
