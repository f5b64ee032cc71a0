"""Reads the whole dataset once, streaming: judges every row by the policies and makes the plan."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.config import DatasetConfig
from tasks.dataset.blocks import read_blocks
from tasks.dataset.formats import identity_of
from tasks.dataset.plan import ACTIONS, EXTRACT, MOST_BATCHES, SKIP, TRUNCATE, Plan, assign_batches
from tasks.dataset.rows import name_row
from tasks.errors import DatasetError
from tasks.files import sha256_of

SHOWN_PROBLEMS = 10
TOO_LONG = "longer than max_seq_len"


@dataclass(frozen=True)
class Scan:
    """The dataset's content hash and what is to be done with its rows."""

    sha256: str
    plan: Plan


def scan_dataset(
    config: DatasetConfig, vocab_size: int, token_bytes: int, shard_bytes: int, most_batches: int = MOST_BATCHES
) -> Scan:
    """Read `config.path`, apply its policies, group the rows into at most `most_batches`.

    token_bytes: stored bytes a token. Raises DatasetError if the file is missing, damaged or of no known kind, or one
    that lists the first rows that a policy `fail` forbids, with their numbers, and the count of each kind.
    """
    before = identity_of(config.path)
    with ThreadPoolExecutor(1) as pool:  # hashlib lets the other thread run meanwhile
        digest = pool.submit(sha256_of, config.path)
        plan = _plan(config, vocab_size, token_bytes, shard_bytes, most_batches)
    if identity_of(config.path) != before:
        raise DatasetError(
            f"The dataset {config.path} was written to while it was read. Start again when it is complete "
            "(dataset.path)."
        )
    return Scan(digest.result(), plan)


def _plan(config: DatasetConfig, vocab_size: int, token_bytes: int, shard_bytes: int, most_batches: int) -> Plan:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("offset", "size", "input_tokens", "tokens", "action")}
    reasons: list[str] = []
    ids: list[pa.Array] = []
    rows = 0
    problems: list[str] = []
    kinds: Counter[str] = Counter()

    def refuse(number: int, kind: str, detail: str) -> None:
        kinds[kind] += 1
        if len(problems) < SHOWN_PROBLEMS:
            problems.append(f"  {name_row(config.path, number)}: {detail}")

    for block in read_blocks(config.path, vocab_size):
        first, rows = rows, rows + len(block)
        too_long = block.tokens > config.max_seq_len
        action = np.full(len(block), ACTIONS.index(EXTRACT), dtype=np.uint8)
        block_reasons = [""] * len(block)
        for at in sorted([*block.invalid, *np.flatnonzero(too_long).tolist()]):
            policy: str
            if invalid := block.invalid.get(at):
                policy, kind, reason = config.on_invalid, invalid.kind, str(invalid)
            else:
                policy, kind = config.on_too_long, TOO_LONG
                reason = f"{block.tokens[at]} tokens, max_seq_len is {config.max_seq_len}"
            action[at] = ACTIONS.index(TRUNCATE if policy == "truncate" else SKIP)
            block_reasons[at] = reason
            if policy == "fail":
                refuse(first + at, kind, reason)
        tokens = np.where(action == ACTIONS.index(SKIP), 0, np.minimum(block.tokens, config.max_seq_len))
        for name, array in (
            ("offset", block.offset),
            ("size", block.size),
            ("input_tokens", block.tokens),
            ("tokens", tokens.astype(np.int32)),
            ("action", action),
        ):
            columns[name].append(array)
        reasons += block_reasons
        ids.append(pa.array(block.ids, pa.string()))

    if not rows:
        raise DatasetError(f"The dataset {config.path} is empty (dataset.path).")
    if problems:
        raise DatasetError(_refusal(config, rows, problems, kinds))
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    if not whole["tokens"].any():
        raise DatasetError(f"{config.path} has no row to extract: {rows} rows, all skipped (dataset.path).")
    skipped = whole["action"] == ACTIONS.index(SKIP)
    batch = assign_batches(whole["tokens"], skipped, token_bytes, shard_bytes, most_batches)
    return Plan(**whole, batch=batch, reason=reasons, id=pa.chunked_array(ids, pa.string()))


def _refusal(config: DatasetConfig, rows: int, problems: list[str], kinds: Counter[str]) -> str:
    count = sum(kinds.values())
    summary = ", ".join(f"{kind}: {number}" for kind, number in kinds.most_common())
    more = f"\n  ... and {count - len(problems)} more" if count > len(problems) else ""
    advice = []
    if kinds.pop(TOO_LONG, 0):
        advice.append("raise dataset.max_seq_len, or set dataset.on_too_long to 'truncate' or 'skip'")
    if kinds:
        advice.append("mend the file, or set dataset.on_invalid to 'skip'")
    return (
        f"{count} of {rows} rows of {config.path} cannot be extracted ({summary}):\n"
        + "\n".join(problems)
        + more
        + f"\nNothing was started. To go on: {'; '.join(advice)}."
    )
