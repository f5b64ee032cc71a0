"""Reads one shard back, each byte once: its checksum, its header, every value, its ids and masks against the input.

A piece of a few megabytes is read from the file into one buffer, hashed and measured there, and forgotten: memory does
not grow with shards or rows, and the pieces come in the order of the file, as a remote store would send them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from tasks.dataset.plan import Plan
from tasks.dataset.rows import Row, read_planned
from tasks.storage import Location
from tasks.store.layout import Store
from tasks.store.record import Record, RowRecord, RowRecords, record_path
from tasks.store.shard import AUX, DTYPES, IDS, LAST, MASK, tensor_name
from tasks.tensors import LayoutError, Tensor, read_header, tensors_in_order
from tasks.verification import values
from tasks.verification.findings import Check, Problem
from tasks.verification.values import FORMATS, Format, Measured

PIECE = 4 << 20  # bytes read at a time: hashed and measured while they are in the cache
RMS_TOLERANCE = 0.01  # relative, between the device's sum and ours: both in float32, in another order


@dataclass(frozen=True)
class Figures:
    """What a shard's rows measure; arrays of [rows] or [rows, states], aux layers in order, then the final state."""

    row: np.ndarray
    """int64."""
    median: np.ndarray
    """float32: the median token's root mean square, without the first token, where models sink attention."""
    largest: np.ndarray
    """float32: largest magnitude in the row's largest tokens."""
    last: np.ndarray
    """uint64: XXH3-64 of the last token's final state."""
    ids: np.ndarray
    """uint64: XXH3-64 of the token ids."""


FIGURES: dict[str, type] = dict(
    zip(Figures.__annotations__, (np.int64, np.float32, np.float32, np.uint64, np.uint64), strict=True)
)


@dataclass(frozen=True)
class Checked:
    """One shard, read back."""

    record: str
    """File name of its commit record."""
    bytes: int
    problems: list[Problem]
    figures: Figures


def join(figures: Iterable[Figures], rows: int, states: int) -> Figures:
    """The figures of several shards, of at most so many rows together, as those of one.

    Each goes into its place as it comes: many small arrays that are freed at the end leave holes that nobody fills.
    """
    joined: dict[str, np.ndarray] = {
        name: np.empty((rows, states) if name in ("median", "largest") else rows, dtype)
        for name, dtype in FIGURES.items()
    }
    end = 0
    for one in figures:
        begin, end = end, end + len(one.row)
        if begin < end:
            for name, column in joined.items():
                column[begin:end] = getattr(one, name)
    return Figures(**{name: column[:end] for name, column in joined.items()})


class ShardReader:
    """Reads shards of one store, one after the other, with one buffer. For one thread."""

    def __init__(
        self, store: Store, plan: Plan, dataset: Path, extraction: dict[str, Any], count: Callable[[int], None]
    ):
        """count: told the bytes of each piece that was read."""
        self.store, self.plan, self.dataset, self.count = store, plan, dataset, count
        self.fingerprint, self.parts = extraction["fingerprint"], extraction["parts"]
        self.form: Format = FORMATS[self.parts["dtype"]]
        self.names = [*(f"layer {layer}" for layer in self.parts["layers"]), "final"]
        self.buffer = np.empty(PIECE, dtype=np.uint8)
        self.scratch = values.scratch()

    def check(self, record: Record) -> Checked:
        """Read a record's shard and say what is wrong with it."""
        name = record_path(self.store, record.batch, record.part).name
        if record.fingerprint != self.fingerprint:
            problem = Problem("books", f"{name} belongs to another extraction ({record.fingerprint[:12]}...)", name)
            return Checked(name, 0, [problem], self._figures({}, {}, {}))
        if record.file is None:
            return Checked(name, 0, [], self._figures({}, {}, {}))
        path = self.store.shards / record.file
        try:
            return self._check_file(path, record, name)
        except FileNotFoundError:
            text = f"{name}: its shard {record.file} is missing"
        except _Damaged as error:
            text = f"{record.file} {error}"
        except OSError as error:
            text = f"{record.file} cannot be read: {error.strerror}"
        return Checked(name, record.bytes, [Problem("bytes", text, name, mend="shard")], self._figures({}, {}, {}))

    def _check_file(self, path: Location, record: Record, name: str) -> Checked:
        size = path.stat().st_size
        if size != record.bytes:
            raise _Damaged(f"has {size} bytes, the record says {record.bytes}")
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            try:
                head, header = read_header(file, size)
                tensors = tensors_in_order(header, size - len(head))
                _check_names(record, header, tensors)
            except LayoutError as error:
                file.seek(0)
                self._read_rest(file, size, digest)
                _compare(digest, record)
                raise _Damaged(f"is not what its record says: {error}") from error
            digest.update(head)
            self.count(len(head))
            measured, small = {}, {}
            for tensor in tensors:
                kind = tensor.name.partition(".")[2]
                if kind in (AUX, LAST) and (states := self._states_in(tensor)):
                    measured[tensor.name] = self._measure(file, tensor, states, digest)
                elif kind in (IDS, MASK):
                    small[tensor.name] = self._read_small(file, tensor, digest)
                else:
                    self._read_rest(file, tensor.nbytes, digest)
        _compare(digest, record)
        shapes = {tensor.name: tensor for tensor in tensors}
        norms = self._norms(record.rows, measured)
        problems = self._check_rows(record, name, shapes, measured, norms, small)
        return Checked(name, size, problems, self._figures(measured, norms, small))

    def _states_in(self, tensor: Tensor) -> int:
        """How many states a token has in this tensor; 0 if it is not what the extraction stores."""
        hidden = self.parts["hidden_size"]
        if tensor.dtype != DTYPES[self.parts["dtype"]] or len(tensor.shape) != 2 or not tensor.shape[0]:
            return 0
        return tensor.shape[1] // hidden if tensor.shape[1] % hidden == 0 else 0

    def _measure(self, file: BinaryIO, tensor: Tensor, states: int, digest: Any) -> "_Row":
        tokens = tensor.shape[0]
        width = tensor.nbytes // tokens
        if len(self.buffer) < width:
            self.buffer = np.empty(width, dtype=np.uint8)
        at_a_time = len(self.buffer) // width
        into = values.start(states, self.form)
        for first in range(0, tokens, at_a_time):
            piece = self.buffer[: min(at_a_time, tokens - first) * width]
            self._fill(file, piece, digest)
            values.measure(piece.reshape(-1, width), states, self.form, into, self.scratch)
        last_token = piece[-width:]
        last_state = last_token[-width // states :]
        return _Row(
            into, xxhash.xxh3_64_intdigest(last_state.data), values.few_magnitudes(last_token, states, self.form)
        )

    def _read_small(self, file: BinaryIO, tensor: Tensor, digest: Any) -> np.ndarray:
        data = np.empty(tensor.nbytes, dtype=np.uint8)
        self._fill(file, data, digest)
        return data.view(np.dtype("<i4")) if tensor.dtype == "I32" else data

    def _read_rest(self, file: BinaryIO, size: int, digest: Any) -> None:
        while size:
            piece = self.buffer[: min(size, len(self.buffer))]
            self._fill(file, piece, digest)
            size -= len(piece)

    def _fill(self, file: BinaryIO, piece: np.ndarray, digest: Any) -> None:
        view = piece.data
        while view:
            got = file.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise _Damaged("became shorter while it was read")
            view = view[got:]
        digest.update(piece)
        self.count(len(piece))

    def _check_rows(
        self,
        record: Record,
        name: str,
        shapes: dict[str, Tensor],
        measured: dict[str, "_Row"],
        norms: dict[int, np.ndarray],
        small: dict[str, np.ndarray],
    ) -> list[Problem]:
        problems = []
        numbers = RowRecords.of(record.rows).numbers
        inputs = read_planned(self.dataset, self.plan, numbers, self.parts["vocab_size"])
        for row, source in zip(record.rows, inputs, strict=True):
            tensors = {kind: shapes[tensor_name(row.row, kind)] for kind in (AUX, LAST, IDS, MASK)}
            checks: list[tuple[Check, str | None]] = [("bytes", self._check_shapes(row, source, tensors))]
            if checks[0][1] is None:
                checks += [
                    ("input", self._check_input(row, source, small)),
                    ("values", self._check_values(row, measured, norms[row.row])),
                ]
            problems += [
                Problem(check, f"{record.file} row {row.row}: {text}", name, row.row, "row")
                for check, text in checks
                if text
            ]
        return problems

    def _check_shapes(self, row: RowRecord, source: Row, tensors: dict[str, Tensor]) -> str | None:
        tokens, hidden, layers = len(source.input_ids), self.parts["hidden_size"], self.parts["layers"]
        if row.tokens != tokens:
            return f"the record says {row.tokens} tokens, the plan {tokens}"
        aux, last = tensors[AUX], tensors[LAST]
        if aux.shape != (tokens, hidden * len(layers)) or last.shape != (tokens, hidden):
            return f"states of shape {aux.shape} and {last.shape} for {tokens} tokens"
        dtype = DTYPES[self.parts["dtype"]]
        if aux.dtype != dtype or last.dtype != dtype:
            return f"states of dtype {aux.dtype} and {last.dtype}, not {dtype}"
        return None

    def _check_input(self, row: RowRecord, source: Row, small: dict[str, np.ndarray]) -> str | None:
        if not np.array_equal(small[tensor_name(row.row, IDS)], source.input_ids):
            return "the token ids are not the input's"
        if not np.array_equal(small[tensor_name(row.row, MASK)], source.loss_mask):
            return "the loss mask is not the input's"
        return None

    def _check_values(self, row: RowRecord, measured: dict[str, "_Row"], norms: np.ndarray) -> str | None:
        """norms: [tokens, states]."""
        parts = [measured[tensor_name(row.row, kind)] for kind in (AUX, LAST)]
        lost = [bits for part in parts for bits in values.lost_bits(part.values, self.form)]
        few = [count for part in parts for count in part.few]
        all_rms = np.sqrt(np.square(norms).sum(axis=0) / (len(norms) * self.parts["hidden_size"])).tolist()
        # What is right is right in all states: seen at once.
        right = all(abs(rms - other) <= RMS_TOLERANCE * other for rms, other in zip(all_rms, row.rms))
        if right and not any(lost) and not any(few) and np.isfinite(norms).all() and norms.all():
            return None
        for state, (name, rms, measured_rms) in enumerate(zip(self.names, all_rms, row.rms)):
            if len(bad := np.flatnonzero(~np.isfinite(norms[:, state]))):
                return f"{name} is not finite at token {bad[0]}" + _more(bad)
            if len(bad := np.flatnonzero(norms[:, state] == 0)):
                return f"{name} is all zero at token {bad[0]}" + _more(bad)
            if not abs(rms - measured_rms) <= RMS_TOLERANCE * measured_rms:
                return f"{name} has RMS {rms:.6g}, the server measured {measured_rms:.6g}"
            if lost[state]:
                return (
                    f"{name} has lost precision: the {lost[state]} low mantissa bits of its {self.parts['dtype']} are "
                    f"zero in all {parts[state == len(self.names) - 1].values.looked_at} values looked at"
                )
            if few[state]:
                return f"{name} has lost precision: its last token has only {few[state]} different magnitudes"
        return None

    def _norms(self, rows: Sequence[RowRecord], measured: dict[str, "_Row"]) -> dict[int, np.ndarray]:
        """float64 [tokens, states] of each row that has all its states, and as many of each."""
        norms = {}
        for number in RowRecords.of(rows).numbers.tolist():
            parts = [measured.get(tensor_name(number, kind)) for kind in (AUX, LAST)]
            found = [np.concatenate(part.values.norms) for part in parts if part]
            if sum(one.shape[1] for one in found) == len(self.names) and len(set(map(len, found))) == 1:
                norms[number] = np.concatenate(found, axis=1).astype(np.float64)
        return norms

    def _figures(
        self, measured: dict[str, "_Row"], norms: dict[int, np.ndarray], small: dict[str, np.ndarray]
    ) -> Figures:
        lines: list[tuple[Any, ...]] = []
        for number, found in norms.items():
            aux, last = (measured[tensor_name(number, kind)] for kind in (AUX, LAST))
            bits = np.concatenate([aux.values.largest, last.values.largest])
            lines.append(
                (
                    number,
                    np.median(found[1:] if len(found) > 1 else found, axis=0) / self.parts["hidden_size"] ** 0.5,
                    values.as_values(bits, self.form),
                    last.last_token,
                    xxhash.xxh3_64_intdigest(small[tensor_name(number, IDS)].tobytes()),
                )
            )
        columns = list(zip(*lines)) or [()] * len(FIGURES)
        shapes = (-1, (-1, len(self.names)), (-1, len(self.names)), -1, -1)
        return Figures(
            *(np.array(column, dtype).reshape(shape) for column, dtype, shape in zip(columns, FIGURES.values(), shapes))
        )


@dataclass(frozen=True)
class _Row:
    """One tensor of states, measured."""

    values: Measured
    last_token: int
    """XXH3-64 of the last token's last state."""
    few: list[int]


class _Damaged(Exception):
    """The shard as a whole does not count."""


def _check_names(record: Record, header: dict[str, Any], tensors: list[Tensor]) -> None:
    """Raises LayoutError if the shard is another extraction's or holds other rows than the record says."""
    found = (header.get("__metadata__") or {}).get("fingerprint")
    if found != record.fingerprint:
        raise LayoutError(f"it belongs to another extraction ({str(found)[:12]}...): a file of an earlier run")
    rows = RowRecords.of(record.rows).numbers.tolist() + [row.row for row in record.withdrawn]
    wanted = {tensor_name(row, tensor) for row in rows for tensor in (AUX, LAST, IDS, MASK)}
    if differing := wanted ^ {tensor.name for tensor in tensors}:
        raise LayoutError(f"it and its record differ in {len(differing)} tensors, as {min(differing)}")


def _compare(digest: Any, record: Record) -> None:
    if (actual := digest.hexdigest()) != record.checksum:
        raise _Damaged(f"is damaged: checksum {actual}, the record says {record.checksum}")


def _more(bad: np.ndarray) -> str:
    return f" and {len(bad) - 1} more" if len(bad) > 1 else ""
