"""The flows: what happens, in order. `python -m flows --help` is the command line."""

import os

# Offline and quiet, whoever runs a flow. MLflow wants the word "true", Prefect takes it too.
for _name, _value in {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}.items():
    os.environ.setdefault(_name, _value)
