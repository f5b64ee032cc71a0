"""MLflow's part: what came from what. The only package that imports MLflow."""

import os

# MLflow reads the last one when it is imported. Its HTTP client retries for 246 s by default when its server is down;
# nobody should wait for that.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
