"""What a verification came to, kept with the store for the report and for programs."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.files import write_json
from tasks.store.layout import Store
from tasks.verification.distribution import Outlier

OUTCOME = "verification.json"  # in the store's logs
PASSED, FAILED, INCOMPLETE, UNFINISHED = "passed", "failed", "incomplete", "unfinished"


@dataclass(frozen=True)
class Verified:
    """A store that passed."""

    digest: str
    """SHA-256 of manifest.json, hexadecimal."""
    rows: dict[str, int]
    """Rows by state: done, truncated, skipped, failed."""
    tokens: int
    bytes: int
    shards: int
    reextracted: int
    """Rows extracted a second time and compared."""
    largest_difference: float | None
    """Largest relative error among them."""
    outliers: int = 0
    """Rows to look at; none so far away that it was a problem."""


@dataclass
class Outcome:
    """Everything that one verification found. JSON all the way: the report is made of it."""

    verdict: str = UNFINISHED
    at: str = ""
    """When it ended, UTC."""
    seconds: float = 0.0
    """That the reading took."""
    bytes_read: int = 0
    """By this run."""
    bytes_kept: int = 0
    """By an earlier run that did not finish, not read again."""
    shards: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """By state; `missing` too."""
    tokens: int = 0
    bytes: int = 0
    digest: str | None = None
    """Of the manifest, if it passed."""
    problems: list[dict[str, Any]] = field(default_factory=list)
    incomplete: str | None = None
    """Why the store is not complete."""
    outliers: list[Outlier] = field(default_factory=list)
    outlier_rows_judged: int = 0
    distributions: list[dict[str, Any]] = field(default_factory=list)
    proofs: dict[str, Any] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    """Rows that one proof does not believe, with the figures."""
    duplicates: dict[str, int] = field(default_factory=dict)
    comparison: dict[str, Any] | None = None
    repaired: dict[str, Any] | None = None


def write_outcome(store: Store, outcome: Outcome) -> None:
    """Keep it in the store's logs."""
    store.logs.mkdir(exist_ok=True)
    write_json(store.logs / OUTCOME, asdict(outcome))


def read_outcome(store: Store) -> Outcome | None:
    """The last verification's outcome, or None if there was none, or one of another version."""
    try:
        value = json.loads((store.logs / OUTCOME).read_bytes())
        value["outliers"] = [Outlier(**line) for line in value["outliers"]]
        return Outcome(**value)
    except (OSError, ValueError, KeyError, TypeError):
        return None
