"""The second extraction on a real server: measured noise lets a right store pass, and no wrong state through."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tasks.config import VerifyConfig
from tasks.errors import VerificationError
from tasks.store.layout import Store
from tasks.store.record import read_records, write_record
from tasks.store.shard import AUX, IDS, LAST, MASK, ShardWriter, tensor_name
from tasks.verification import Outcome, read_outcome, verify_store
from tests.integration.serving import Serving, cpu_config, serving
from tests.unit.helpers import raw, rms_of

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

ROWS = 24
CONFIG = VerifyConfig(reextract_rows=8, reextract_share=0)


@pytest.fixture(scope="module")
def server(
    demo_model: Path, demo_dataset: Path, staging: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("second")
    lines = sorted(demo_dataset.read_text().splitlines(keepends=True), key=len)
    dataset = folder / "dataset.jsonl"
    dataset.write_text("".join(lines[:ROWS]))
    config = cpu_config(demo_model, dataset, folder / "output", staging, output={"shard_bytes": 4 << 20})
    with serving(config, folder / "server.log") as found:
        yield found


@pytest.fixture(scope="module")
def store(server: Serving) -> Store:
    return server.extract(server.preflight.config.output.path)


def verify(server: Serving, store: Store) -> Outcome:
    with server.engine() as engine:
        verify_store(store, server.preflight.config.dataset.path, 0.0, CONFIG, engine)
    outcome = read_outcome(store)
    assert outcome is not None
    return outcome


def test_a_right_store_passes_by_noise_that_was_measured(server: Serving, store: Store) -> None:
    outcome = verify(server, store)
    compared = outcome.comparison
    assert compared is not None
    assert len(compared["rows"]) == 8
    for kind in (0, 1):
        for noise, largest, limit in zip(compared["noise"][kind], compared["largest"][kind], compared["limits"][kind]):
            assert max(noise, largest) <= limit
            assert limit < 1  # the states of other ids differ by more
    assert compared["top_token_rows"] == 8
    assert compared["top_token_agreement"] > 0.85
    assert outcome.proofs["argmax"]["applies"]
    print(compared["noise"], compared["limits"], compared["largest"], compared["top_token_agreement"])


def one_wrong_token(aux: torch.Tensor, last: torch.Tensor) -> None:
    last[len(last) // 2] = last[len(last) // 2 + 1]


def first_token_of_a_chunk_lost(aux: torch.Tensor, last: torch.Tensor) -> None:
    aux[10:] = torch.roll(aux[10:], 1, 0)


@pytest.mark.parametrize("spoil", [one_wrong_token, first_token_of_a_chunk_lost])
def test_states_of_the_right_size_that_are_not_the_row_s_are_found(
    server: Serving, store: Store, spoil: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    outcome = verify(server, store)
    assert outcome.comparison is not None
    row = outcome.comparison["rows"][3]
    (record,) = [record for record in read_records(store) if row in [one.row for one in record.rows]]
    path = store.shards / str(record.file)
    before = path.read_bytes()
    rewrite(store, record, row, spoil)
    try:
        with pytest.raises(
            VerificationError, match=f"row {row}: (extracted again|its states are not those of its token ids)"
        ):
            verify(server, store)
    finally:
        path.write_bytes(before)
        write_record(store, record)


def rewrite(store: Store, record, row: int, spoil: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Store a row otherwise, with a record that fits: only its content is wrong."""
    path = store.shards / record.file
    with safe_open(path, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name).clone() for name in shard.keys()}  # noqa: SIM118 - it is no dict
    rows = []
    with ShardWriter(path, len(record.rows), "bfloat16", {"fingerprint": record.fingerprint}) as writer:
        for one in record.rows:
            aux, last, ids, mask = (tensors[tensor_name(one.row, kind)] for kind in (AUX, LAST, IDS, MASK))
            if one.row == row:
                spoil(aux, last)
            writer.add(one.row, raw(aux), raw(last), ids.numpy(), mask.numpy())
            rows.append(dataclasses.replace(one, rms=rms_of(aux, last)))
        written = writer.finish()
    write_record(store, dataclasses.replace(record, bytes=written.bytes, checksum=written.checksum, rows=rows))
