"""Where each file of a store lies, and whose store it is."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import OutputError, StoreError
from tasks.files import sha256_of_json, write_json
from tasks.storage import Location, side_folder


@dataclass(frozen=True)
class Store:
    """A store's directory or prefix. Names only: opening one reads and writes nothing."""

    root: Location

    @property
    def extraction(self) -> Location:
        """The fingerprint and its parts."""
        return self.root / "extraction.json"

    @property
    def plan(self) -> Location:
        return self.root / "plan.parquet"

    @property
    def shards(self) -> Location:
        return self.root / "shards"

    @property
    def ledger(self) -> Location:
        """What became of each row; written by verify."""
        return self.root / "ledger.parquet"

    @property
    def manifest(self) -> Location:
        """Totals and digests; written last by verify: its presence says that the store is complete."""
        return self.root / "manifest.json"

    @property
    def index(self) -> Path:
        """Which row lies where, for readers; made from the commit records, and anew where they change. Local."""
        folder = self.root if isinstance(self.root, Path) else side_folder(self.root)
        return folder / "index.safetensors"

    @property
    def logs(self) -> Location:
        """What runs leave beside the data: probe and re-extraction reports, figures of each run, the MLflow id."""
        return self.root / "logs"

    @property
    def beside(self) -> Path:
        """A local name that logs of servers begin with: they are no part of the store."""
        return self.root if isinstance(self.root, Path) else side_folder(self.root) / self.root.name

    @property
    def lock(self) -> Location:
        return self.root / "lock.json"

    def partition_lock(self, number: int) -> Location:
        """The lock of one partition's writer, where several write to disjoint batches."""
        return self.root / f"lock-{number:04d}.json"

    def shard(self, batch: int, part: int) -> Location:
        """A batch's shard. Parts after 0 hold rows of the batch that an earlier part does not."""
        return self.shards / f"{shard_stem(batch, part)}.safetensors"


def shard_stem(batch: int, part: int) -> str:
    """The name that a shard and its commit record share, without what follows it."""
    return f"{batch:06d}" if part == 0 else f"{batch:06d}.{part}"


def batch_of(path: Location) -> int:
    """The batch of a shard or commit record, by its name, which begins with digits."""
    return int(re.split(r"\D", path.name, maxsplit=1)[0])


def in_batches(path: Location, batches: range | None) -> bool:
    """Whether a shard or commit record is of one of these batches; None: of any."""
    return batches is None or batch_of(path) in batches


def fingerprint_of(parts: dict[str, Any]) -> str:
    """The hash of all that decides the bytes of a store, hexadecimal."""
    return sha256_of_json(parts)


def read_extraction(store: Store) -> dict[str, Any] | None:
    """`extraction.json`, or None where there is none yet. Raises StoreError if it is damaged."""
    try:
        value = json.loads(store.extraction.read_bytes())
        same = fingerprint_of(value["parts"]) == value["fingerprint"] and isinstance(value["config"], dict)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{store.extraction} is damaged: {error!r}") from error
    if not same:
        raise StoreError(f"{store.extraction} was changed by hand: its fingerprint is not that of its parts.")
    return value


def check_owner(store: Store, parts: dict[str, Any]) -> bool:
    """Whether the store exists and belongs to these parts; False where it is new.

    Raises OutputError naming the fields that differ, or if the directory holds something else.
    """
    found = read_extraction(store)
    if found is None:
        if store.root.exists() and not all(_is_ours(path, store) for path in store.root.iterdir()):
            raise OutputError(
                f"{store.root} is not empty and holds no extraction (no {store.extraction.name}). Choose another "
                "output.path."
            )
        return False
    if found["fingerprint"] == fingerprint_of(parts):
        return True
    fields = sorted(set(parts) | set(found["parts"]))
    lines = [
        f"  {field}: the output has {found['parts'].get(field)!r}, this run has {parts.get(field)!r}"
        for field in fields
        if found["parts"].get(field) != parts.get(field)
    ]
    raise OutputError(
        f"{store.root} belongs to another extraction; these fields differ:\n"
        + "\n".join(lines)
        + "\nChoose another output.path, or go back to the settings of that extraction."
    )


def _is_ours(path: Location, store: Store) -> bool:
    """Whether a run that died before it had a store can have left this file."""
    return path.name.startswith(store.lock.name) or (path.name.startswith(".") and path.name.endswith(".tmp"))


def create_store(store: Store, parts: dict[str, Any], config: dict[str, Any]) -> None:
    """Write `extraction.json`, the store's first file; `config` is kept beside the parts for people."""
    store.root.mkdir(parents=True, exist_ok=True)
    write_json(store.extraction, {"fingerprint": fingerprint_of(parts), "parts": parts, "config": config})
