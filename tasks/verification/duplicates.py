"""Rows that have what they cannot have: the same final state for other ids, or other states for the same ids."""

import numpy as np

from tasks.probe import DIFFERENT, relative_errors
from tasks.store.layout import Store
from tasks.verification.findings import Problem
from tasks.verification.stored import StoredRows, StoredStates


def find_duplicates(rows: np.ndarray, last: np.ndarray, ids: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of rows with one last state but different ids, and groups with the same ids.

    The last token's final state depends on all ids before it, so two prompts never share it to the bit. rows, last,
    ids: [rows], as in `Figures`.
    """
    shared = [group for group in _groups(last) if len(set(ids[group].tolist())) > 1]
    return [rows[group].tolist() for group in shared], [rows[group].tolist() for group in _groups(ids)]


def shared_states(groups: list[list[int]], records: StoredRows) -> list[Problem]:
    """A problem for each row that has another row's final state."""
    problems = []
    for group in groups:
        for row in group:
            others = ", ".join(str(other) for other in group[:6] if other != row)
            name, record = records[row]
            text = f"{record.file} row {row}: its last final state is that of row {others}, to the bit, for other ids"
            problems.append(Problem("duplicates", text, name, row, "row"))
    return problems


def differing_twins(store: Store, groups: list[list[int]], records: StoredRows) -> list[Problem]:
    """Rows with the same ids must have the same states but for rounding: their last tokens are compared."""
    problems = []
    stored = StoredStates(store)
    for group in groups:
        first = stored.at(records[group[0]][1], group[0], [-1])
        for row in group[1:]:
            error = max(relative_errors(first, stored.at(records[row][1], row, [-1])))
            if not error < DIFFERENT:
                for one, other in ((row, group[0]), (group[0], row)):
                    name, record = records[one]
                    text = (
                        f"{record.file} row {one}: row {other} has the same ids, and its states differ by {error:.3g}"
                    )
                    problems.append(Problem("duplicates", text, name, one, "row"))
    return problems


def _groups(values: np.ndarray) -> list[np.ndarray]:
    """Places of values that occur more than once."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    same = ordered[1:] == ordered[:-1]  # as the one before
    del ordered
    begins = np.flatnonzero(same & ~np.concatenate([[False], same[:-1]])) if len(same) else np.empty(0, np.int64)
    ends = np.flatnonzero(same & ~np.concatenate([same[1:], [False]])) + 2 if len(same) else begins
    return [order[begin:end] for begin, end in zip(begins, ends)]
