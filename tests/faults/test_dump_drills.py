"""Dumps that are spoiled in staging, on a real server: each is found out, and its row prefilled again.

The named fake: `open_dump` is wrapped, so that each row's first dump, which is real, is spoiled in the moment before it
is opened. From outside nobody could hit that moment, some milliseconds after the plugin's rename.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.extraction import lane as lane_module
from tasks.probe import states_of
from tasks.server.dumps import Captured, Dump, open_dump
from tests.faults.drill import Site

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ROWS = 24

Spoil = Callable[[Path, Path], None]


def truncated(dump: Path, foreign: Path) -> None:
    with dump.open("r+b") as file:
        file.truncate(dump.stat().st_size // 2)


def zeroed(dump: Path, foreign: Path) -> None:
    """The states are lost, header, figures and ids are not."""
    with dump.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        ids = 4 * int(dump.stem.rpartition("-")[2])
        file.seek(start)
        file.write(bytes(dump.stat().st_size - start - ids))


def foreign(dump: Path, foreign: Path) -> None:
    """Another prompt's dump under this one's name."""
    shutil.copyfile(foreign, dump)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, "cannot be read: .*"),
        (zeroed, "has holes: nothing was written at layer 0, token 0"),
        (foreign, "has the wrong request: "),
    ],
    ids=["truncated", "zeroed", "foreign"],
)
def test_a_spoiled_dump_costs_one_retry(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, message: str
) -> None:
    rows, spoiled = site.running.rows()[:ROWS], set()
    refused: list[str] = []

    def spoil_first(path: Path, ids: np.ndarray, expected: Captured) -> Dump:
        row = path.name.split("-")[2]
        if row not in spoiled:
            spoiled.add(row)
            spoil(path, other)
        try:
            return open_dump(path, ids, expected)
        except Exception as error:
            refused.append(str(error))
            raise

    with site.running.engine() as engine:
        kept: Any = engine.submit(ROWS, site.running.rows()[ROWS].input_ids).result(60)
        other = tmp_path / "other"
        shutil.copyfile(kept.path, other)
        engine.release(kept)
        del kept
        monkeypatch.setattr(lane_module, "open_dump", spoil_first)
        futures = {row.number: engine.submit(row.number, row.input_ids) for row in rows}
        for number, future in futures.items():
            dump = future.result(120)
            site.assert_right(number, states_of(dump.aux, dump.last))
            engine.release(dump)
        assert engine.progress.retries == ROWS
        assert len(refused) == ROWS
        assert all(re.search(message, text) for text in refused), refused[:3]
