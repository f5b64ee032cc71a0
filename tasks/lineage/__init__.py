"""MLflow's part: what came from what. The only package that imports MLflow."""
