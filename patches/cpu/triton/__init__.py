"""Stand-in for Triton on a CPU (see placeholders.py)."""

import placeholders


def jit(function=None, **options):
    return placeholders.Kernel(function) if function is not None else placeholders.Kernel


def decorator(*args, **kwargs):
    return lambda function: function


class Config:
    """One autotuning choice: kept, never used."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


placeholders.install(
    __name__,
    version="3.0.0",
    autotune=decorator,
    heuristics=decorator,
    cdiv=lambda a, b: -(-a // b),
    next_power_of_2=lambda n: 1 << (max(int(n), 1) - 1).bit_length(),
)

import triton.language  # noqa: E402 - `triton.language` is read as an attribute without an import
import triton.runtime  # noqa: E402,F401 - the same
