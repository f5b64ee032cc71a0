"""The state folder: what drillcore keeps that is no output."""

import os
from pathlib import Path


def state_home() -> Path:
    """The state folder, absolute: $DRILLCORE_HOME, or `.drillcore` in the working directory."""
    return Path(os.environ.get("DRILLCORE_HOME", ".drillcore")).absolute()
