"""The Prefect API or MLflow dies in mid-run: the data ends complete all the same."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tasks.store.layout import Store
from tests.faults.drill import Service, Site, mlflow_service, prefect_service, wait_for_commits

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Service]:
    service = prefect_service(tmp_path / "prefect")
    service.start()
    yield service
    service.stop()


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Service]:
    service = mlflow_service(tmp_path / "mlflow")
    yield service
    service.stop()


def test_a_prefect_api_that_is_away_for_a_while_costs_nothing(site: Site, tmp_path: Path, prefect: Service) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    run = site.flows("extract", config, PREFECT_API_URL=f"{prefect.url}/api")
    wait_for_commits(run, store, 2)
    prefect.kill()
    time.sleep(10)
    prefect.start()
    assert run.wait() == 0, run.err
    print(f"{run.seconds:.1f} s")
    site.assert_complete(store)


def test_a_prefect_api_that_never_comes_back_costs_no_data(site: Site, tmp_path: Path, prefect: Service) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    run = site.flows("extract", config, PREFECT_API_URL=f"{prefect.url}/api")
    wait_for_commits(run, store, 2)
    prefect.kill()
    killed = time.monotonic()
    code = run.wait(600)
    print(f"ended {time.monotonic() - killed:.1f} s after the kill with exit code {code}\n{run.out}\n{run.err}")
    assert code == 0
    site.assert_complete(store)


def recorded(mlflow: Service) -> list[tuple[str, str]]:
    """(status, digest) of each run that MLflow has."""
    client = MlflowClient(mlflow.url)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    return [(run.info.status, run.data.tags["hidden_states.digest"]) for run in runs]


@pytest.mark.parametrize("up_first", [True, False], ids=["killed", "never up"])
def test_a_dead_mlflow_costs_no_data_and_is_told_later_once(
    site: Site, tmp_path: Path, mlflow: Service, up_first: bool
) -> None:
    config = site.write_config(tmp_path / "output", lineage={"tracking_uri": mlflow.url})
    store = Store(tmp_path / "output")
    if up_first:
        mlflow.start()
    run = site.flows("extract", config)
    wait_for_commits(run, store, 2)
    if up_first:
        mlflow.kill()
    assert run.wait() == 0, run.err
    print(f"{run.seconds:.1f} s")
    site.assert_complete(store)
    later = f"python -m flows record {store.root}"
    assert f"MLflow     not recorded; later: {later}" in run.out
    assert f"When MLflow is back: {later}" in run.err

    mlflow.start()
    for _ in range(2):
        late = site.flows("record", store.root)
        assert late.wait() == 0, late.err
    ((status, digest),) = recorded(mlflow)
    assert status == "FINISHED"
    assert digest in run.out
