"""The flow `verify`: check any output, without a server."""

from pathlib import Path

from tasks.errors import StoreError
from tasks.store.layout import Store, read_extraction
from tasks.store.lock import WriterLock
from tasks.verification import Verified, verify_store


def verify_output(output: Path, dataset: Path | None = None) -> Verified:
    """Check an output against its books and its dataset (default: where the extraction read it)."""
    store = Store(output)
    found = read_extraction(store)
    if found is None:
        raise StoreError(f"{output} holds no extraction: there is no {store.extraction.name}.")
    config = found["config"]
    with WriterLock(store.lock):
        return verify_store(store, dataset or Path(config["dataset"]["path"]), config["extraction"]["max_failed_share"])
