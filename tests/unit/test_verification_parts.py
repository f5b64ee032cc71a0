"""The parts of verification, each by itself: statistics that accuse nobody by chance, resuming, noise, precision."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.config import VerifyConfig
from tasks.store.record import FailedRow, read_record, read_records, write_record
from tasks.verification import ReadingProgress, read_outcome, verify_store
from tasks.verification import kept as kept_module
from tasks.verification import shards as shards_module
from tasks.verification.alignment import choose_places, strength
from tasks.verification.distribution import find_outliers
from tasks.verification.duplicates import find_duplicates
from tasks.verification.kept import FILE
from tasks.verification.reextract import choose_rows, differences, noise_limits
from tasks.verification.stored import StoredRows, StoredStates
from tasks.verification.values import BLOCK, FORMATS, as_values, few_magnitudes, lost_bits, measure, scratch, start
from tests.unit.helpers import HIDDEN, SmallStore, make_store

NAMES = ["layer 1", "final"]


def raw_bytes(state: torch.Tensor) -> np.ndarray:
    return state.contiguous().view(torch.uint8).numpy().reshape(len(state), -1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norms_and_largest_values_are_those_of_torch(dtype: str) -> None:
    form = FORMATS[dtype]
    states = torch.randn(37, 3, 64, generator=torch.Generator().manual_seed(1)).to(form.torch_dtype)
    states[5, 1, 7], states[6, 2, 0] = -900.0, 0.0
    into = start(3, form)
    for first in range(0, 37, 10):
        measure(raw_bytes(states[first : first + 10].flatten(1)), 3, form, into, scratch())
    norms, bits = np.concatenate(into.norms), into.largest
    np.testing.assert_allclose(norms, torch.linalg.vector_norm(states.float(), dim=-1).numpy(), rtol=1e-6)
    largest = norms.argmax(axis=0)
    expected = [float(states[token, state].float().abs().max()) for state, token in enumerate(largest)]
    assert (as_values(bits, form) >= np.array(expected, dtype=np.float32)).all()
    assert as_values(bits, form)[1] == float(torch.tensor(900.0).to(form.torch_dtype))
    assert lost_bits(into, form) == [0, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_not_finite_has_no_finite_norm(dtype: str, value: float) -> None:
    form = FORMATS[dtype]
    states = torch.full((4, 1, 8), 6e4, dtype=form.torch_dtype)
    states[2, 0, 3] = value
    into = start(1, form)
    measure(raw_bytes(states.flatten(1)), 1, form, into, scratch())
    assert np.isfinite(np.concatenate(into.norms)[:, 0]).tolist() == [True, True, False, True]


def test_a_token_larger_than_a_block_is_measured_too() -> None:
    states = torch.randn(2, 3, BLOCK // 2, generator=torch.Generator().manual_seed(9)).bfloat16()
    into = start(3, FORMATS["bfloat16"])
    measure(raw_bytes(states.flatten(1)), 3, FORMATS["bfloat16"], into, scratch())
    expected = torch.linalg.vector_norm(states.float(), dim=-1).numpy()
    np.testing.assert_allclose(np.concatenate(into.norms), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "through", "lost"),
    [
        ("bfloat16", torch.float8_e4m3fn, 4),
        ("bfloat16", torch.float8_e5m2, 5),
        ("bfloat16", torch.bfloat16, 0),
        ("float16", torch.bfloat16, 3),
        ("float32", torch.bfloat16, 16),
        ("float32", torch.float16, 13),
        ("float32", torch.float32, 0),
    ],
)
def test_precision_that_was_lost_on_the_way_shows(dtype: str, through: torch.dtype, lost: int) -> None:
    form = FORMATS[dtype]
    states = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(2)).to(through).float()
    states[:, 0] = torch.randn(9, 64)
    into = start(2, form)
    measure(raw_bytes(states.to(form.torch_dtype).flatten(1)), 2, form, into, scratch())
    assert lost_bits(into, form) == [0, lost]


def test_a_few_values_without_low_bits_are_no_proof() -> None:
    form = FORMATS["bfloat16"]
    into = start(1, form)
    measure(raw_bytes(torch.ones(3, 16, dtype=torch.bfloat16)), 1, form, into, scratch())
    assert lost_bits(into, form) == [0]


def test_fp8_with_a_scale_of_its_own_has_few_magnitudes() -> None:
    token = torch.randn(2, 2048, generator=torch.Generator().manual_seed(3))
    token[1] = (token[1] / 0.0123).to(torch.float8_e4m3fn).float() * 0.0123
    counts = few_magnitudes(raw_bytes(token.bfloat16().view(1, -1))[0], 2, FORMATS["bfloat16"])
    assert counts[0] == 0
    assert 0 < counts[1] <= 126


def test_states_that_have_nothing_to_do_with_the_tokens_give_a_normal_z() -> None:
    generator = torch.Generator().manual_seed(4)
    found = [
        strength(torch.randn(64, 32, generator=generator), torch.randn(64, 32, generator=generator)).z
        for _ in range(300)
    ]
    assert abs(np.mean(found)) < 0.2
    assert 0.85 < np.std(found) < 1.15


def test_states_that_hold_their_tokens_stand_far_out_whatever_few_dimensions_do() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(64, 256, generator=generator)
    states = 0.2 * weights + torch.randn(64, 256, generator=generator)
    states[:, 3] += 1e4  # as large dimensions of real models are
    assert strength(states, weights).z > 15
    assert abs(strength(torch.roll(states, 1, 0), weights).z) < 4
    assert strength(torch.ones(4, 8), torch.ones(4, 8)).z == 0


def test_places_hold_different_tokens_and_never_the_first() -> None:
    tokens = np.array([7, 7, 8, 8, 9, 7, 8, 5], dtype=np.int32)
    places = choose_places(tokens, seed=1)
    assert sorted(tokens[places].tolist()) == [5, 7, 8, 9]
    assert 0 not in places
    assert len(choose_places(tokens[:1], seed=1)) == 0


def test_a_row_of_one_token_has_no_places_and_no_states_there(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    record = read_record(small.store.shards / "000000.json")
    places = choose_places(np.array([5]), seed=0)
    states = StoredStates(small.store).at(record, record.rows[0].row, places.tolist())
    assert states.shape[1] == 0
    assert strength(states[0], torch.empty(0, states.shape[-1])).places == 1  # which says nothing about the row


def test_rows_of_one_distribution_have_no_outliers_and_a_strange_one_is_named() -> None:
    random = np.random.default_rng(6)
    clean = np.exp(random.normal(1.0, 0.1, (2000, 2)))
    rows, tokens = np.arange(2000), np.full(2000, 100)
    assert find_outliers(NAMES, rows, tokens, clean) == ([], 2000)
    clean[77, 1] *= 3
    clean[99, 0] /= 50
    (first, second), judged = find_outliers(NAMES, rows, tokens, clean)
    assert (first.row, first.state, first.far) == (99, "layer 1", True)
    assert (second.row, second.state, second.far) == (77, "final", False)
    assert judged == 2000


def test_few_rows_and_short_rows_are_not_judged() -> None:
    strange = np.ones((10, 2))
    strange[3] = 1e6
    assert find_outliers(NAMES, np.arange(10), np.full(10, 100), strange) == ([], 0)
    many = np.ones((50, 2))
    many[3] = 1e6
    assert find_outliers(NAMES, np.arange(50), np.where(np.arange(50) == 3, 2, 100), many) == ([], 49)


def test_equal_states_are_grouped_by_whether_the_ids_are_equal() -> None:
    rows = np.array([10, 11, 12, 13, 14])
    last = np.array([5, 6, 5, 7, 7], dtype=np.uint64)
    ids = np.array([1, 2, 3, 4, 4], dtype=np.uint64)
    assert find_duplicates(rows, last, ids) == ([[10, 12]], [[13, 14]])


def test_noise_limits_come_from_the_noise() -> None:
    random = np.random.default_rng(7)
    noise = np.exp(random.normal(np.log(0.02), 0.2, (8, 2, 4)))
    limits = noise_limits(noise, "bfloat16")
    assert ((limits > 0.03) & (limits < 0.3)).all()
    again = np.exp(random.normal(np.log(0.02), 0.2, (5000, 2, 4)))
    assert (again <= limits).all()
    # One row of which the two new extractions differ widely does not widen the limits for the others.
    noise[3] = 2.0
    assert (noise_limits(noise, "bfloat16") < 0.5).all()


def test_rows_that_come_out_the_same_beside_others_that_do_not_widen_no_limit() -> None:
    """Seen: limits of 0.9 over a row and 1,600 for a token: logarithms of nothing and of something lie far apart."""
    noise = np.full((20, 2, 3), 1e-6)
    noise[::2] = 0
    assert noise_limits(noise, "float32").tolist() == [[1e-4] * 3, [1e-2] * 3]


def test_noise_that_did_not_show_in_two_batches_is_still_allowed() -> None:
    """Seen: two new extractions alike, and a right store, of other batches, 0.016 away from both."""
    assert noise_limits(np.zeros((8, 2, 3)), "bfloat16").tolist() == [[0.06] * 3, [0.25] * 3]
    assert noise_limits(np.zeros((8, 2, 3)), "float32").tolist() == [[1e-4] * 3, [1e-2] * 3]
    assert (noise_limits(np.zeros((2, 2, 3)), "bfloat16")[0] == 0.1).all()


def test_one_wrong_token_among_many_shows_in_the_second_figure() -> None:
    one = torch.randn(2, 4000, 8, generator=torch.Generator().manual_seed(8))
    other = one.clone()
    other[1, 1234] *= -1
    over_row, worst = differences(one, other)
    assert over_row[0] == worst[0] == 0
    assert over_row[1] < 0.05
    assert worst[1] == pytest.approx(2.0)


def test_where_rounding_chooses_experts_a_few_tokens_of_a_row_may_be_anything_and_not_many() -> None:
    one = torch.randn(1, 1000, 8, generator=torch.Generator().manual_seed(8))
    few, many = one.clone(), one.clone()
    few[0, :50] *= -1
    many[0, :51] *= -1
    assert differences(one, few, experts=True) == [[0.0], [0.0]]
    assert differences(one, many, experts=True)[1] == [pytest.approx(2.0)]
    assert differences(one[:, :1], -one[:, :1], experts=True)[1] == [pytest.approx(2.0)]


def test_the_rows_to_extract_again_hold_what_is_doubtful() -> None:
    config = VerifyConfig(reextract_rows=3, reextract_share=0)
    chosen = choose_rows(np.arange(100), config, [42, 7])
    assert {42, 7} < set(chosen)
    assert len(chosen) <= 5
    assert chosen == choose_rows(np.arange(100), config, [42, 7])


class Interrupt(Exception):
    pass


def interrupt_after(monkeypatch: pytest.MonkeyPatch, shards: int) -> list[str]:
    """The verification is cut short when it has read so many shards; the list has the shards that are read."""
    read: list[str] = []
    check = shards_module.ShardReader.check

    def counting(self: shards_module.ShardReader, record: object) -> object:
        if len(read) >= shards:
            raise Interrupt
        read.append(record.file)  # type: ignore[attr-defined]
        return check(self, record)  # type: ignore[arg-type]

    monkeypatch.setattr(shards_module.ShardReader, "check", counting)
    monkeypatch.setattr("tasks.verification.reading.THREADS", 1)
    return read


def begin(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Verify until one shard of three is read."""
    with monkeypatch.context() as patch:
        first = interrupt_after(patch, 1)
        with pytest.raises(Interrupt):
            verify_store(small.store, small.dataset, 0.0)
    return first


def verify(small: SmallStore, **options: bool) -> int:
    """Bytes that it read."""
    verify_store(small.store, small.dataset, 0.0, **options)  # type: ignore[arg-type]
    outcome = read_outcome(small.store)
    assert outcome is not None
    assert outcome.bytes_read + outcome.bytes_kept == outcome.bytes
    return outcome.bytes_read


def test_every_stored_row_leads_to_its_record(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    records = read_records(small.store)
    stored = StoredRows(small.store, records, 7)
    batches = {0: 0, 1: 0, 2: 1, 3: 1, 5: 2, 6: 2}
    assert dict(stored) == {row: (f"00000{batch}.json", records[batch]) for row, batch in batches.items()}
    assert (len(stored), stored.numbers().tolist()) == (6, [0, 1, 2, 3, 5, 6])
    assert 4 not in stored
    assert -1 not in stored
    assert 7 not in stored
    assert list(stored.without([3], ["000002.json"])) == [0, 1, 2]
    assert len(stored) == 6
    again = replace(records[0], part=1, rows=[records[0].rows[1], replace(records[0].rows[0], row=9)])
    assert StoredRows(small.store, [*records, again], 7)[1] == ("000000.1.json", again)  # a later part wins


def test_no_tokens_of_a_row_are_no_states(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    record = read_records(small.store)[0]
    assert StoredStates(small.store).at(record, 0, []).shape == (3, 0, HIDDEN)


def test_a_verification_that_was_cut_short_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_store(tmp_path)
    whole = sum(path.stat().st_size for path in small.store.shards.glob("*.safetensors"))
    first = begin(small, monkeypatch)
    assert first == ["000000.safetensors"]
    outcome = read_outcome(small.store)
    assert outcome is not None
    assert outcome.verdict == "unfinished"
    assert verify(small) == whole - (small.store.shards / first[0]).stat().st_size
    assert verify(small) == whole  # it passed: the next one reads everything again


def test_fresh_reads_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_store(tmp_path)
    begin(small, monkeypatch)
    assert verify(small, fresh=True) == sum(path.stat().st_size for path in small.store.shards.glob("*.safetensors"))


@pytest.mark.parametrize("change", ["shard", "record", "age", "half a line"])
def test_what_was_read_counts_only_for_the_same_files_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    small = make_store(tmp_path)
    begin(small, monkeypatch)
    lines = small.store.logs / FILE
    if change == "shard":
        path = small.shard_path(0)
        path.write_bytes(path.read_bytes())
    elif change == "record":
        write_record(small.store, read_record(small.record_path(0)))
    elif change == "age":
        monkeypatch.setattr(kept_module, "KEPT", 0.0)
    else:
        lines.write_bytes(lines.read_bytes()[:-30])
    assert verify(small) == sum(path.stat().st_size for path in small.store.shards.glob("*.safetensors"))


def test_damage_after_a_shard_was_read_is_found_by_a_resumed_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_store(tmp_path)
    begin(small, monkeypatch)
    with small.shard_path(0).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    with pytest.raises(Exception, match=r"000000\.safetensors is damaged: checksum"):
        verify(small)


def test_progress_says_bytes_rate_and_time_left() -> None:
    progress = ReadingProgress(bytes=4 << 30, shards=8, started=0.0, bytes_done=1 << 30, shards_done=2)
    assert progress.text().startswith("1.0 GiB of 4.0 GiB read, 2 of 8 shards, ")
    assert " GB/s, " in progress.text()
    assert " left, 0 problems" in progress.text()


def test_what_was_found_is_kept_as_json(tmp_path: Path) -> None:
    small = make_store(tmp_path, leave_out=(5,))
    record = read_record(small.record_path(6))
    write_record(small.store, record.__class__(**{**vars(record), "failed": [FailedRow(5, "HTTP 503")]}))
    verify_store(small.store, small.dataset, 0.5)
    value = json.loads((small.store.logs / "verification.json").read_bytes())
    assert value["verdict"] == "passed"
    assert value["rows"] == {"done": 4, "truncated": 1, "skipped": 1, "failed": 1, "missing": 0}
    assert value["proofs"]["argmax"]["reason"].startswith("not applicable: the output does not say where")
    assert [one["state"] for one in value["distributions"]] == ["layer 1", "layer 4", "final"]
