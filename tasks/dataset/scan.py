"""Reads the whole dataset once, streaming: judges every row by the policies and makes the plan."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.config import DatasetConfig
from tasks.dataset.plan import ACTIONS, EXTRACT, SKIP, TRUNCATE, Plan, assign_batches
from tasks.dataset.rows import InvalidRow, parse_row
from tasks.errors import DatasetError

SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Scan:
    """The dataset's content hash and what is to be done with its rows."""

    sha256: str
    plan: Plan


def scan_dataset(config: DatasetConfig, vocab_size: int, token_bytes: int, shard_bytes: int) -> Scan:
    """Read `config.path`, apply its policies, group the rows into batches.

    token_bytes: stored bytes a token. Raises DatasetError that lists the first rows that a policy `fail` forbids, with
    their line numbers, and the count of each kind.
    """
    offsets, sizes, input_tokens, tokens, actions = array("q"), array("q"), array("i"), array("i"), array("B")
    reasons: list[str] = []
    ids: list[str | None] = []
    problems: list[str] = []
    kinds: Counter[str] = Counter()
    digest = hashlib.sha256()
    offset = 0

    def refuse(number: int, kind: str, detail: str) -> None:
        kinds[kind] += 1
        if len(problems) < SHOWN_PROBLEMS:
            problems.append(f"  line {number + 1} (row {number}): {detail}")

    for number, line in enumerate(_lines(config.path)):
        digest.update(line)
        length, row_id, action, reason = 0, None, EXTRACT, ""
        try:
            row = parse_row(line, number, vocab_size)
            length, row_id = len(row.input_ids), row.id
        except InvalidRow as error:
            action, reason = SKIP, str(error)
            if config.on_invalid == "fail":
                refuse(number, error.kind, str(error))
        if length > config.max_seq_len:
            reason = f"{length} tokens, max_seq_len is {config.max_seq_len}"
            action = TRUNCATE if config.on_too_long == "truncate" else SKIP
            if config.on_too_long == "fail":
                refuse(number, "longer than max_seq_len", reason)
        offsets.append(offset)
        sizes.append(len(line))
        input_tokens.append(length)
        tokens.append(0 if action == SKIP else min(length, config.max_seq_len))
        actions.append(ACTIONS.index(action))
        reasons.append(reason)
        ids.append(row_id)
        offset += len(line)

    if problems:
        raise DatasetError(_refusal(config, len(offsets), problems, kinds))
    if not any(tokens):
        raise DatasetError(f"{config.path} has no row to extract: {len(offsets)} lines, all skipped (dataset.path).")
    token_array = np.array(tokens, dtype=np.int32)
    action_array = np.array(actions, dtype=np.uint8)
    plan = Plan(
        offset=np.array(offsets, dtype=np.int64),
        size=np.array(sizes, dtype=np.int64),
        input_tokens=np.array(input_tokens, dtype=np.int32),
        tokens=token_array,
        action=action_array,
        batch=assign_batches(token_array, action_array == ACTIONS.index(SKIP), token_bytes, shard_bytes),
        reason=reasons,
        id=ids,
    )
    return Scan(digest.hexdigest(), plan)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise DatasetError(f"The dataset {path} does not exist (dataset.path).") from error
    except OSError as error:
        raise DatasetError(f"The dataset {path} cannot be read: {error.strerror} (dataset.path).") from error
    empty = True
    with file:
        for line in file:
            empty = False
            yield line
    if empty:
        raise DatasetError(f"The dataset {path} is empty (dataset.path).")


def _refusal(config: DatasetConfig, rows: int, problems: list[str], kinds: Counter[str]) -> str:
    count = sum(kinds.values())
    summary = ", ".join(f"{kind}: {number}" for kind, number in kinds.most_common())
    more = f"\n  ... and {count - len(problems)} more" if count > len(problems) else ""
    advice = []
    if kinds.pop("longer than max_seq_len", 0):
        advice.append("raise dataset.max_seq_len, or set dataset.on_too_long to 'truncate' or 'skip'")
    if kinds:
        advice.append("mend the file, or set dataset.on_invalid to 'skip'")
    return (
        f"{count} of {rows} rows of {config.path} cannot be extracted ({summary}):\n"
        + "\n".join(problems)
        + more
        + f"\nNothing was started. To go on: {'; '.join(advice)}."
    )
