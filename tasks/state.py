"""The state folder: what drillcore keeps that is no output."""

import os
from pathlib import Path


def state_home() -> Path:
    """The state folder, absolute: $DRILLCORE_HOME, or `.drillcore` in the working directory."""
    return Path(os.environ.get("DRILLCORE_HOME", ".drillcore")).absolute()


def mlflow_uri() -> str:
    """The MLflow database of the state folder."""
    return f"sqlite:///{state_home() / 'mlflow.db'}"


def mlflow_artifacts() -> Path:
    """The artifact folder that goes with `mlflow_uri`."""
    return state_home() / "mlflow-artifacts"
