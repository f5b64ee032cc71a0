"""Stand-in for torchvision on a CPU (see placeholders.py): its real wheel does not load beside a CPU torch."""

import placeholders

placeholders.install(__name__, version="0.0.0")

import torchvision.io  # noqa: E402 - read as attributes without an import
import torchvision.ops  # noqa: E402
import torchvision.transforms  # noqa: E402,F401
