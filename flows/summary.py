"""What an extraction came to, as the flow's result and as text for a person."""

from pathlib import Path

from pydantic import BaseModel

from tasks.files import human_bytes, human_seconds
from tasks.storage import is_remote


class Stored(BaseModel):
    """A store that is complete, and what this run added to it."""

    rows: dict[str, int]
    """By state: done, truncated, skipped, failed."""
    tokens: int
    bytes: int
    shards: int
    digest: str
    output: Path | str
    extracted_tokens: int
    """By this run; the others were there already."""
    mlflow_run: str | None

    def what_is_stored(self) -> list[tuple[str, str]]:
        """(name, value)."""
        return [
            ("rows", count_states(self.rows)),
            ("stored", f"{self.tokens:,} tokens, {self.bytes:,} B ({human_bytes(self.bytes)}), {self.shards} shards"),
        ]

    def where_it_is(self, argument: str = "") -> list[tuple[str, str]]:
        """(name, value); argument: the output as a command takes it, where that is more than its name."""
        later = f"not recorded; later: python -m flows record {argument or self.output}"
        return [("digest", self.digest), ("output", str(self.output)), ("MLflow", self.mlflow_run or later)]


class Summary(Stored):
    """An extraction that ended well."""

    extracted_rows: int
    """By this run; the others were there already."""
    seconds: float
    """That this run's extraction took, server and verification not counted."""
    usage: dict[str, float]
    """Shares of the servers' time, and requests and tokens in flight on average; empty where nothing was extracted."""
    reextracted: int
    output_argument: str = ""
    """The output as a command takes it, where that is more than its name."""

    def text(self, config: Path) -> str:
        """Lines of name and value; config: the file that the extraction was started with."""
        return as_lines(self.lines(f"python -m flows retry-failed {config}"))

    def lines(self, retry: str = "run the extraction with only_failed") -> list[tuple[str, str]]:
        """(name, value); retry: how the rows that failed are tried again."""
        return [
            *self.what_is_stored(),
            *self._failed(retry),
            ("this run", self._this_run()),
            *usage_lines(self.usage, "spool or staging" if is_remote(self.output) else "staging"),
            ("verified", f"everything read back; {self.reextracted} rows extracted a second time and compared"),
            *self.where_it_is(self.output_argument),
        ]

    def _failed(self, retry: str) -> list[tuple[str, str]]:
        if not (count := self.rows["failed"]):
            return []
        return [
            ("failed", f"{count:,} rows; the reasons are in {self.output}/ledger.parquet"),
            ("", f"to try them again: {retry}"),
        ]

    def _this_run(self) -> str:
        there = self.rows["done"] + self.rows["truncated"] - self.extracted_rows
        if not self.extracted_rows:
            return "resumed: every row was there already, nothing was extracted"
        rate = self.extracted_tokens / self.seconds
        resumed = f" (resumed: {there:,} rows were there already)" if there else ""
        return (
            f"{self.extracted_rows:,} rows, {self.extracted_tokens:,} tokens in {human_seconds(self.seconds)}: "
            f"{rate:,.0f} tokens/s{resumed}"
        )


class FleetSummary(Stored):
    """An extraction by several nodes that ended well."""

    nodes: int
    partitions: int
    """That something was missing of."""
    retries: int
    """Runs that were lost or failed, and were made up for."""
    seconds: float
    """From the first run's begin to the last one's end; servers' starts and verification not counted."""

    def text(self) -> str:
        """Lines of name and value."""
        rate = (
            f"{self.extracted_tokens / self.seconds:,.0f} tokens/s" if self.seconds else "nothing was left to extract"
        )
        lost = f", {self.retries} runs were lost or failed and made up for" if self.retries else ""
        lines = [
            *self.what_is_stored(),
            ("fleet", f"{self.partitions} partitions on {self.nodes} nodes: {rate}{lost}"),
            *self.where_it_is(),
        ]
        return as_lines(lines)


def usage_lines(usage: dict[str, float], room: str = "staging") -> list[tuple[str, str]]:
    """Was the server always full, and if not, why: a line, or none where nothing was extracted. room: that may lack."""
    if not usage:
        return []
    shares = [
        f"{usage['full']:.1%} full",
        f"{usage['starved']:.1%} with room for more",
        f"{usage['blocked']:.1%} waiting for {room}",
        f"{usage['lost']:.1%} lost",
        *([f"{usage['behind']:.1%} with its writers behind"] if usage["behind"] >= 0.001 else []),
    ]
    in_flight = f"{usage['requests']:,.1f} requests, {usage['tokens']:,.0f} tokens in flight on average"
    return [("server", f"{', '.join(shares)}; {in_flight}")]


def count_states(rows: dict[str, int]) -> str:
    """{"done": 80, "skipped": 1} -> '80 done, 1 skipped'."""
    return ", ".join(f"{count:,} {state}" for state, count in rows.items())


def as_lines(pairs: list[tuple[str, str]]) -> str:
    """Name and value a line, in two columns."""
    return "\n".join(f"  {name:<10} {value}" for name, value in pairs)
