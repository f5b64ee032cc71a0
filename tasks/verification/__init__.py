"""Reads back what was stored and says whether it is complete and right; only then is the manifest written.

Checked: each row of the plan is in exactly one place of the books; each shard's size, checksum and header against its
record; ids and masks against the input file; every value finite, no state zero, no precision lost, the RMS as the
plugin measured it; no state twice; the norms against the run's own distribution; on a random share, that states belong
to their tokens, and, where there is a server, that a second extraction gives the same.
"""

from tasks.store.manifest import read_manifest
from tasks.verification.outcome import Outcome, Verified, read_outcome
from tasks.verification.reading import ReadingProgress, Show
from tasks.verification.verify import comparison_due, verify_store

__all__ = [
    "Outcome",
    "ReadingProgress",
    "Show",
    "Verified",
    "comparison_due",
    "read_manifest",
    "read_outcome",
    "verify_store",
]
