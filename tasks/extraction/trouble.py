"""What went wrong with a batch, for the people who watch a run. The store's own account is in its commit records."""

from dataclasses import dataclass
from typing import Any

from tasks.extraction.batch import BatchResult

NAMED = 10  # rows of one reason


@dataclass(frozen=True)
class Trouble:
    """One thing that happened to one batch."""

    batch: int
    what: str
    rows: str
    """Those concerned, the first of them; empty where it is the whole batch."""
    reason: str

    def as_line(self) -> dict[str, Any]:
        """For a table."""
        return {"batch": f"{self.batch:06d}", "what": self.what, "rows": self.rows, "reason": self.reason}


def troubles_of(result: BatchResult) -> list[Trouble]:
    """The rows of a batch that failed, by reason."""
    by_reason: dict[tuple[str, bool], list[int]] = {}
    for failure in result.failed:
        by_reason.setdefault((failure.reason, failure.may_heal), []).append(failure.row)
    troubles = []
    for (reason, may_heal), rows in by_reason.items():
        more = f" and {len(rows) - NAMED:,} more" if len(rows) > NAMED else ""
        what = f"{len(rows):,} row(s) failed; the next run " + ("tries them again" if may_heal else "leaves them")
        troubles.append(Trouble(result.batch, what, ", ".join(map(str, rows[:NAMED])) + more, reason))
    return troubles
