"""Checks an output that is there already, without a server, and writes its report."""

from collections.abc import Callable
from pathlib import Path

from tasks.config import VerifyConfig
from tasks.errors import StoreError
from tasks.report import write_report
from tasks.store.bucket_lock import writer_lock
from tasks.store.layout import Store, read_extraction
from tasks.verification import Verified, verify_store
from tasks.verification.reading import Show


def verify_output(
    store: Store,
    dataset: Path | None = None,
    fresh: bool = False,
    repair: bool = False,
    show: Show = lambda progress: None,
    report: Callable[[Store], object] = write_report,
) -> Verified:
    """Check an output against its books and its dataset (default: where the extraction read it); write its report.

    fresh: read again what an unfinished verification has read. repair: put what is wrong back into the plan.
    show: told now and then how far it is. report: writes the report, passed or not.
    """
    found = read_extraction(store)
    if found is None:
        raise StoreError(f"{store.root} holds no extraction: there is no {store.extraction.name}.")
    config = found["config"]
    with writer_lock(store) as lock:
        try:
            return verify_store(
                store,
                dataset or Path(config["dataset"]["path"]),
                config["extraction"]["max_failed_share"],
                VerifyConfig(**config.get("verify", {})),
                fresh=fresh,
                repair=lock if repair else None,
                show=show,
            )
        finally:
            report(store)
