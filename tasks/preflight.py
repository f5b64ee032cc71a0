"""Everything that can be known before a server starts: is the input right, is there room, what is still to do."""

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config import ExtractConfig
from tasks.dataset.manifest import check_agreement, check_contents
from tasks.dataset.plan import MOST_BATCHES, NO_BATCH, SKIP, TRUNCATE, Plan, load_plan, save_plan
from tasks.dataset.scan import Scan, scan_dataset
from tasks.errors import OutputError, SetupError, SpaceError, StoreError
from tasks.files import free_bytes, human_bytes, human_seconds, sha256_of
from tasks.model import ITEMSIZE, Model, capture_layers, read_model
from tasks.patching import Installation, find_installation, plugin_version
from tasks.server.dumps import Captured
from tasks.server.facts import numerics_of_arguments, numerics_of_info, server_info
from tasks.server.ports import check_port
from tasks.storage import S3Path, as_location
from tasks.storage.access import check_access
from tasks.storage.bucket import CredentialsSource
from tasks.storage.spool import SPARE, spool_limit
from tasks.store.books import DONE, FAILED, TRUNCATED, Books, balance
from tasks.store.bucket_lock import spool_folder
from tasks.store.inspection import NOTHING, Inspection, inspect_store, remove_remains
from tasks.store.layout import Store, check_owner, create_store, fingerprint_of
from tasks.store.partitions import Partition, find_partition
from tasks.store.shard import ENTRY_BYTES, row_bytes

MOST_AT_ONCE = 128  # batches: threads, and open files
ROW_OVERHEAD = 4 * ENTRY_BYTES + 512  # bytes a row takes in shard header, record and plan, at most

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preflight:
    """A checked extraction: what there is, what is to do, what it takes."""

    config: ExtractConfig
    store: Store
    model: Model
    layers: list[int]
    installation: Installation | None
    """None for an attached server."""
    sglang: str
    """The server's version."""
    numerics: dict[str, str | None]
    """Settings of the server that change the states' values."""
    dataset_sha256: str
    plan: Plan
    resumed: bool
    """Whether the output holds this extraction already, begun or finished."""
    inspection: Inspection
    """What the output has, as it was when preflight looked."""
    books: Books
    missing: dict[int, np.ndarray]
    """Rows that this run extracts, by batch; int64, ascending."""
    partition: Partition | None = None
    """All that this run looks at and writes to, where others extract the rest; inspection and books know no more."""
    fleet: str = ""
    """Of the partition."""

    @property
    def captured(self) -> Captured:
        return Captured(self.layers, self.config.capture.final_norm, self.config.server.dtype, self.model.hidden_size)

    @property
    def token_bytes(self) -> int:
        """Stored bytes a token."""
        return token_bytes(self.config, self.model, self.layers)

    @property
    def missing_rows(self) -> int:
        return sum(map(len, self.missing.values()))

    @property
    def missing_tokens(self) -> int:
        return sum(int(self.plan.tokens[rows].sum()) for rows in self.missing.values())

    @property
    def tokens_by_batch(self) -> np.ndarray:
        """int64 [batches], of the whole plan."""
        planned = self.plan.batch != NO_BATCH
        return np.bincount(self.plan.batch[planned], self.plan.tokens[planned], self.plan.batches).astype(np.int64)

    @property
    def batches_at_once(self) -> int:
        """So many that the servers are full, and as much again waits: a batch ends with less and less in flight."""
        limits, rows = self.config.extraction, max(1, self.missing_rows)
        in_flight = min(limits.tokens_in_flight, limits.requests_in_flight * self.missing_tokens / rows)
        wanted = 2 * in_flight * max(1, self.config.server.servers)
        batch = self.missing_tokens / max(1, len(self.missing))
        # Those that are uploaded do not keep the servers busy.
        uploads = int(self.config.s3.spool_bytes / max(1, batch * self.token_bytes)) if self.spool else 0
        return min(MOST_AT_ONCE, 2 + math.ceil(wanted / max(1, batch)) + uploads)

    @property
    def spool(self) -> Path | None:
        """Where shards lie until they are uploaded; None where the output is a directory."""
        return spool_folder(self.store.root) if isinstance(self.store.root, S3Path) else None

    @property
    def most_failed(self) -> int:
        """Rows that may fail in this run; one more stops it early."""
        limits = self.config.extraction
        share = max(limits.max_failed_share, limits.stop_failed_share)
        rows = len(self.plan) if self.partition is None else np.isin(self.plan.batch, self.partition.batches).sum()
        return max(int(share * rows), limits.max_failures_in_a_row)

    @property
    def parts(self) -> dict[str, Any]:
        """All that decides the bytes of the store."""
        config = self.config
        return {
            "format": "drillcore.store/1",
            "input_sha256": self.dataset_sha256,
            "model_identity": self.model.identity,
            "layers": self.layers,
            "final_norm": config.capture.final_norm,
            "dtype": config.server.dtype,
            "hidden_size": self.model.hidden_size,
            "vocab_size": self.model.vocab_size,
            "max_seq_len": config.dataset.max_seq_len,
            "on_too_long": config.dataset.on_too_long,
            "on_invalid": config.dataset.on_invalid,
            "sglang": self.sglang,
            "plugin": plugin_version(),
            **self.numerics,
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.parts)


def token_bytes(config: ExtractConfig, model: Model, layers: list[int]) -> int:
    """Stored bytes a token: the states, its id and its mask."""
    return row_bytes(1, len(layers) + 1, model.hidden_size, ITEMSIZE[config.server.dtype])


def run_preflight(
    config: ExtractConfig,
    space: bool = True,
    only_failed: bool = False,
    deep: bool = False,
    credentials: CredentialsSource | None = None,
    partition: tuple[str, int] | None = None,
    flow_runs: int = 1,
) -> Preflight:
    """Check everything that needs no server; raises the InputError that names what is wrong. Writes nothing; into a
    bucket only a small object, which is deleted again.

    space: also whether there is room for it, which `plan` does after it has printed what is planned.
    only_failed: do the rows that failed, whether they may heal or not, and leave those that were never tried.
    deep: read every shard that is there already and compare checksums, not only sizes.
    credentials: of the bucket; default: boto3's standard chain.
    partition: fleet and number; the plan is then the output's, and only these batches count. flow_runs: that a new plan
    is for: as many times MOST_BATCHES batches.
    """
    store = Store(as_location(config.output.path, config.s3, credentials))
    if isinstance(store.root, S3Path):
        check_access(store.root)
    model = read_model(config.model.path)
    layers = capture_layers(model, config.capture)
    if config.dataset.max_seq_len > model.max_positions:
        raise SetupError(
            f"dataset.max_seq_len is {config.dataset.max_seq_len}, the model takes {model.max_positions} positions "
            f"({config.model.path}/config.json)."
        )
    if config.server.mode == "managed":
        installation: Installation | None = find_installation(config.server.interpreter)
        assert installation is not None
        sglang, numerics = installation.sglang, numerics_of_arguments(config.server.arguments)
        for number in range(config.server.count if config.server.port else 0):
            check_port(config.server.host, config.server.port + number, "server.port")
    else:
        installation, (sglang, numerics) = None, _settings_of_attached(config.server.urls)
    manifest = check_agreement(config.dataset, model)
    if partition:
        found: Partition | None = find_partition(store, *partition)
        scan = Scan(sha256_of(config.dataset.path), load_plan(store.plan))
    else:
        found, a_token = None, token_bytes(config, model, layers)
        limits = (config.output.shard_bytes, MOST_BATCHES * flow_runs)
        scan = scan_dataset(config.dataset, model.vocab_size, a_token, *limits)
    check_contents(config.dataset.path, manifest, scan.sha256)
    fresh = Preflight(
        *(config, store, model, layers, installation, sglang, numerics, scan.sha256, scan.plan),
        resumed=False,
        inspection=NOTHING,
        books=balance(scan.plan, []),
        missing={},
        partition=found,
        fleet=partition[0] if partition else "",
    )
    preflight = _with_progress_of_output(fresh, only_failed, deep)
    if space:
        check_space(preflight)
    return preflight


def _settings_of_attached(urls: list[str]) -> tuple[str, dict[str, str | None]]:
    """SGLang's version and the numerics of servers that run, the same for all. Raises ServerError, SetupError."""
    found = []
    for url in urls:
        info = server_info(url)
        found.append((info["version"], numerics_of_info(info)))
        if found[-1] != found[0]:
            raise SetupError(
                f"The servers at {urls[0]} and {url} are set up differently: {found[0]} and {found[-1]} (server.url). "
                "Their states would differ: start them with the same SGLang and the same arguments."
            )
    return found[0]


def open_output(preflight: Preflight) -> None:
    """Make the store, or the partition, ready to be written; its lock must be held.

    From here on it is not complete, so what says that it is goes first; so does what earlier writers left half done.
    Raises OutputError if another run wrote to it after preflight had looked, before this one had the lock.
    """
    store, partition = preflight.store, preflight.partition
    if not check_owner(store, preflight.parts):
        create_store(store, preflight.parts, preflight.config.model_dump(mode="json"))
    batches = None
    if partition is not None:
        batches = find_partition(store, preflight.fleet, partition.number).batches  # nobody changes it while we write
    if inspect_store(store, preflight.fingerprint, batches=batches).contents != preflight.inspection.contents:
        raise OutputError(f"Another run wrote to {store.root} while this one was checking it. Start this one again.")
    if partition is None:
        store.manifest.unlink(missing_ok=True)
        store.ledger.unlink(missing_ok=True)
        store.index.unlink(missing_ok=True)
        store.shards.mkdir(exist_ok=True)
        store.logs.mkdir(exist_ok=True)
        if not store.plan.exists():
            save_plan(preflight.plan, store.plan)
    for problem in preflight.inspection.problems(store):
        logger.warning("%s: its rows are extracted again", problem)
    remove_remains(store, preflight.inspection)


def check_space(preflight: Preflight) -> None:
    """Raises SpaceError if what is missing does not fit the output, or the longest row the staging."""
    config = preflight.config
    if not preflight.missing_rows:
        return
    if preflight.spool:
        _check_spool(preflight, preflight.spool)
    else:
        check_output_space(preflight)
    longest = preflight.plan.longest * preflight.token_bytes
    staging = min(config.staging.max_bytes, free_bytes(config.staging.path))
    # Twice: a dump is removed from memory a moment after its row counts as gone.
    if 2 * longest > staging:
        raise SpaceError(
            f"The staging {config.staging.path} may hold {human_bytes(staging)} (free space, or staging.max_bytes); "
            f"the longest row, {preflight.plan.longest} tokens, needs {human_bytes(2 * longest)}. Free some, raise the "
            "limit, or choose another staging.path."
        )


def check_output_space(preflight: Preflight) -> None:
    """Raises SpaceError if what is missing does not fit the output, a directory."""
    root = preflight.store.root
    assert isinstance(root, Path)
    # The shards that do not count are removed first.
    freed = sum(path.stat().st_size for path in preflight.inspection.useless_files(preflight.store))
    needed = preflight.missing_tokens * preflight.token_bytes + preflight.missing_rows * ROW_OVERHEAD - freed
    free = free_bytes(root)
    if needed + SPARE > free:
        raise SpaceError(
            f"The output {root} has {human_bytes(free)} free; {preflight.missing_rows} rows with "
            f"{preflight.missing_tokens} tokens need {human_bytes(needed)} and {human_bytes(SPARE)} to spare. Free "
            "some, or choose another output.path."
        )


def _check_spool(preflight: Preflight, folder: Path) -> None:
    tokens = preflight.plan.tokens
    largest = max(
        int(tokens[rows].sum()) * preflight.token_bytes + len(rows) * ROW_OVERHEAD
        for rows in preflight.missing.values()
    )
    room = spool_limit(folder, preflight.config.s3.spool_bytes)
    if largest > room:
        raise SpaceError(
            f"The spool {folder} may hold {human_bytes(max(0, room))} (free space, or s3.spool_bytes); the largest "
            f"shard needs {human_bytes(largest)} until it is uploaded. Free some, choose another s3.spool, or make "
            "output.shard_bytes smaller in a new output."
        )


def staging_limit(config: ExtractConfig) -> int:
    """Bytes of dumps that may be in flight: the configured limit, or half of what is free."""
    return min(config.staging.max_bytes, free_bytes(config.staging.path) // 2)


def describe(preflight: Preflight, rate: float | None = None) -> list[tuple[str, str]]:
    """What is planned, as (name, value) lines for people; rate: tokens a second, for the time that it takes."""
    config, plan, model = preflight.config, preflight.plan, preflight.model
    counts, books = plan.counts(), preflight.books.counts()
    planned = plan.total_tokens * preflight.token_bytes
    state = (
        f"states of layers {', '.join(map(str, preflight.layers))} and the final state ({config.capture.final_norm})"
    )
    lines = [
        ("model", f"{model.path} ({model.architecture}, {model.layers} layers, hidden {model.hidden_size})"),
        ("stored", f"{state}, {config.server.dtype}, {preflight.token_bytes:,} B a token"),
        ("dataset", f"{config.dataset.path} (sha256 {preflight.dataset_sha256[:12]}...)"),
        ("rows", f"{len(plan):,}: {counts[TRUNCATE]:,} truncated, {counts[SKIP]:,} skipped"),
        ("tokens", f"{plan.total_tokens:,}; longest row {plan.longest:,}, max_seq_len {config.dataset.max_seq_len:,}"),
        ("bytes", f"{planned:,} ({human_bytes(planned)}) in {plan.batches:,} shards"),
        *_places(preflight),
        ("staging", f"{config.staging.path} ({human_bytes(free_bytes(config.staging.path))} free)"),
    ]
    if partition := preflight.partition:
        batches = f"batches {partition.first} to {partition.end - 1}"
        lines.append(("partition", f"number {partition.number}: {batches}, {preflight.missing_tokens:,} tokens to do"))
    if preflight.resumed:
        done = books[DONE] + books[TRUNCATED]
        lines.append(("resumes", f"{done:,} rows are there already, {preflight.missing_rows:,} are to do"))
    if books[FAILED]:
        final = len(preflight.books.final)
        lines.append(
            (
                "failed",
                f"{books[FAILED]:,} rows in earlier runs: {books[FAILED] - final:,} may heal, {final:,} would fail "
                "again; `python -m flows retry-failed` tries them all",
            )
        )
    if problems := preflight.inspection.problems(preflight.store):
        lines.append(("damaged", f"{len(problems):,} shards or records, to be extracted again: {problems[0]}"))
    if rate:
        tokens = preflight.missing_tokens
        lines.append(("time", f"{human_seconds(tokens / rate)} for {tokens:,} tokens at {rate:,.0f}/s"))
    return lines


def _places(preflight: Preflight) -> list[tuple[str, str]]:
    root, spool = preflight.store.root, preflight.spool
    if spool is None:
        return [("output", f"{root} ({human_bytes(free_bytes(Path(str(root))))} free)")]
    where = f" at {url}" if (url := preflight.config.s3.endpoint_url) else ""
    room = f"{human_bytes(preflight.config.s3.spool_bytes)} at most, {human_bytes(free_bytes(spool))} free"
    return [("output", f"{root}{where}"), ("spool", f"{spool} ({room})")]


def _with_progress_of_output(preflight: Preflight, only_failed: bool, deep: bool) -> Preflight:
    """Look into the output: is it ours, and which rows does it have already? The plan that it holds is the one to keep.

    Raises OutputError if it belongs to another extraction or has nothing to retry, StoreError if it contradicts itself.
    """
    store, plan, inspection = preflight.store, preflight.plan, preflight.inspection
    resumed = check_owner(store, preflight.parts)
    batches = preflight.partition.batches if preflight.partition else None
    if resumed:
        if not preflight.partition:
            plan = _stored_plan(store, plan)
        inspection = inspect_store(store, preflight.fingerprint, deep, batches)
    books = balance(plan, inspection.records)
    if books.problems:
        raise StoreError(
            f"{store.root} contradicts itself: {'; '.join(books.problems[:5])}. Delete the commit records "
            "(shards/*.json) concerned to extract their rows again."
        )
    failed, due = books.rows(FAILED), books.due()
    if only_failed and len(due) and not failed:
        raise OutputError(
            f"No row of {store.root} failed, so there is nothing to retry; {len(due):,} rows were not extracted yet: "
            "`python -m flows extract` does that."
        )
    wanted = np.zeros(len(plan), dtype=bool)
    wanted[failed if only_failed else due] = True
    left = (rows[wanted[rows]] for rows in plan.rows_by_batch())
    missing = {batch: rows for batch, rows in enumerate(left) if len(rows) and (batches is None or batch in batches)}
    return dataclasses.replace(
        preflight, plan=plan, resumed=resumed, inspection=inspection.without_rows(), books=books, missing=missing
    )


def _stored_plan(store: Store, fresh: Plan) -> Plan:
    """The output's plan: it may group rows otherwise than `fresh` (output.shard_bytes), and must agree in the rest."""
    if not store.plan.exists():
        return fresh
    stored = load_plan(store.plan)
    for name in ("offset", "size", "input_tokens", "tokens", "action"):
        if not np.array_equal(getattr(stored, name), getattr(fresh, name)):
            raise StoreError(
                f"{store.plan} is not the plan of this dataset: its column {name!r} differs. Restore it, or start a "
                "new output."
            )
    return stored
