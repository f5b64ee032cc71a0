"""The run's own distribution of norms, and the rows that stand outside it.

What is compared is the logarithm of a row's median token RMS, without the first token. The RMS over all elements will
not do: models sink attention into the first token, whose norm is a hundred times the others', so the row's RMS follows
its length. Measured on SmolLM2-135M over 70 conversations in ten languages (35 to 1,405 tokens): the row's RMS at layer
14 differs by up to 2.7 times from the run's median, the median token's by at most 1.10 times; over all states by at
most 1.35 times and 3.8 robust standard deviations.
"""

from dataclasses import dataclass

import numpy as np

FEWEST_ROWS = 20  # below, there is no distribution to speak of
FEWEST_TOKENS = 8  # a shorter row's median says little
# An outlier, to be looked at, is as many robust standard deviations away, and differs by as much. A row with a few
# strange tokens does not get there: the median does not see them.
LISTED_DEVIATIONS, LISTED_RATIO = 6.0, 1.5
# So far away that no text explains it: extracted again.
FAR_DEVIATIONS, FAR_RATIO = 20.0, 4.0
BINS = 48


@dataclass(frozen=True)
class Outlier:
    """A row whose states are of another size than the run's."""

    row: int
    state: str
    tokens: int
    median: float
    """The row's median token RMS."""
    usual: float
    """The run's."""
    deviations: float
    """Robust standard deviations between their logarithms."""
    far: bool

    def text(self) -> str:
        return (
            f"{self.state}: the median token has RMS {self.median:.4g}, in the run it is {self.usual:.4g} "
            f"({self.deviations:+.1f} robust standard deviations)"
        )


@dataclass(frozen=True)
class Distribution:
    """One state's median token RMS over the rows."""

    state: str
    rows: int
    quantiles: list[float]
    """Smallest, 5%, median, 95%, largest."""
    largest: float
    """Largest magnitude of any element."""
    bins: list[int]
    """Rows by RMS, in steps that are equal in its logarithm, from smallest to largest."""


def find_outliers(
    names: list[str], rows: np.ndarray, tokens: np.ndarray, median: np.ndarray
) -> tuple[list[Outlier], int]:
    """Outliers, the farthest first, and how many rows were judged.

    rows, tokens: [rows]; median: [rows, states] as in `Figures`; names: of the states.
    """
    judged = (tokens >= FEWEST_TOKENS) & (median > 0).all(axis=1) & np.isfinite(median).all(axis=1)
    if judged.sum() < FEWEST_ROWS:
        return [], 0
    outliers: list[Outlier] = []
    for state, name in enumerate(names):  # one after the other: of a million rows each takes several arrays
        logs = np.log(median[judged, state])  # float32: 7 digits of what is judged by its first
        middle = np.median(logs)
        away = logs - middle
        # 1.4826: what makes it the standard deviation where the distribution is normal.
        spread = max(1.4826 * np.median(np.abs(away)), 1e-3)
        deviations, ratios = away / spread, np.exp(np.abs(away))
        listed = (np.abs(deviations) > LISTED_DEVIATIONS) & (ratios > LISTED_RATIO)
        far = (np.abs(deviations) > FAR_DEVIATIONS) & (ratios > FAR_RATIO)
        outliers += [
            Outlier(
                row=int(rows[place]),
                state=name,
                tokens=int(tokens[place]),
                median=float(np.exp(logs[at])),
                usual=float(np.exp(middle)),
                deviations=float(deviations[at]),
                far=bool(far[at]),
            )
            for at, place in zip(np.flatnonzero(listed), np.flatnonzero(judged)[listed], strict=True)
        ]
    return sorted(outliers, key=lambda outlier: (-abs(outlier.deviations), outlier.row)), int(judged.sum())


def describe(names: list[str], median: np.ndarray, largest: np.ndarray) -> list[Distribution]:
    """What the report shows of each state."""
    described = []
    for state, name in enumerate(names):
        values = median[:, state]
        values = values[(values > 0) & np.isfinite(values)]
        if not len(values):
            continue
        bins = np.histogram(np.log(values), BINS)[0].tolist()
        quantiles = np.quantile(values, [0, 0.05, 0.5, 0.95, 1]).tolist()
        described.append(Distribution(name, len(values), quantiles, float(largest[:, state].max()), bins))
    return described
