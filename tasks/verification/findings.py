"""What a verification finds, as plain data: the command line prints it, the report shows it, a repair acts on it."""

from dataclasses import dataclass
from typing import Literal

Mend = Literal["row", "shard", "nothing"]
Check = Literal[
    "books", "bytes", "input", "values", "duplicates", "distribution", "proof", "second extraction", "top tokens"
]
SHOWN = 20  # lines of a list in a message


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with the store."""

    check: Check
    """Which check found it."""
    text: str
    record: str | None = None
    """File name of the commit record concerned."""
    row: int | None = None
    mend: Mend = "nothing"
    """What has to be extracted again: this row, all rows of the shard, or nothing that would help."""


def shorten(lines: list[str], shown: int = SHOWN) -> str:
    """The first lines, indented, and how many more there are."""
    more = [f"  ... and {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n".join([*(f"  {line}" for line in lines[:shown]), *more])
