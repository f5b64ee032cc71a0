"""prefect.yaml, automations and settings: Prefect accepts typing errors in silence, so these do not."""

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from deployments import deploy
from flows.extract import MOST_ATTEMPTS
from flows.services import PREFECT_SERVER_SETTINGS
from tests.conftest import ROOT

DEPLOYMENTS = ROOT / "deployments"
FILE: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text())
NAMES = [deployment["name"] for deployment in FILE["deployments"]]


def deployed(name: str) -> dict[str, Any]:
    return next(deployment for deployment in FILE["deployments"] if deployment["name"] == name)


def flow_of(name: str) -> Flow[Any, Any]:
    return load_flow_from_entrypoint(f"{ROOT}/{deployed(name)['entrypoint']}")


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = parameter_schema(flow_of(name)).model_dump(mode="json", exclude_unset=True)
    return schema


def closed(schema: Any) -> Any:
    """Prefect's JSON schema of prefect.yaml, in which an unknown key is an error."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["additionalProperties"] = False
    return made


PREFECTS_SCHEMA = closed(PrefectYamlModel.model_json_schema(by_alias=True))


def test_prefect_yaml_is_as_prefect_s_schema_has_it() -> None:
    jsonschema.validate(FILE, PREFECTS_SCHEMA)
    assert set(NAMES) == {"extract", "plan", "verify", "export", "prepare", "extract-fleet", "extract-partition"}


def rename_tags(values: dict[str, Any]) -> None:
    values["deployments"][0]["tag"] = values["deployments"][0].pop("tags")


def rename_queue(values: dict[str, Any]) -> None:
    values["deployments"][1]["work_pool"]["queue"] = "cpu"


def misspell_schedule(values: dict[str, Any]) -> None:
    values["deployments"][0]["schedules"][0]["activ"] = True


@pytest.mark.parametrize("spoil", [rename_tags, rename_queue, misspell_schedule])
def test_the_schema_finds_what_prefect_would_ignore(spoil: Callable[[dict[str, Any]], None]) -> None:
    values = copy.deepcopy(FILE)
    spoil(values)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, PREFECTS_SCHEMA)


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_says_what_it_is_and_where_it_runs(name: str) -> None:
    deployment = deployed(name)
    assert len(deployment["description"]) > 30
    assert "drillcore" in deployment["tags"]
    assert deployment["enforce_parameter_schema"] is True
    assert "concurrency_limit" not in deployment
    pool = deployment["work_pool"]
    assert (pool["name"], pool["work_queue_name"]) in {(deploy.POOL, deploy.GPU), (deploy.POOL, deploy.CPU)}
    assert pool["job_variables"]["stream_output"] is False
    assert flow_of(name).name == {"extract-partition": "extract"}.get(name, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_of_a_deployment_are_its_flow_s(name: str) -> None:
    parameters, schema = deployed(name)["parameters"], schema_of(name)
    assert set(parameters) <= set(schema["properties"])
    validate(parameters, schema, raise_on_error=True)
    flow_of(name).validate_parameters(copy.deepcopy(parameters))


@pytest.mark.parametrize("name", NAMES)
def test_the_form_explains_every_field(name: str) -> None:
    schema = schema_of(name)
    sections = {f"of {name}": schema, **schema.get("definitions", {})}
    unexplained = [
        f"{section}.{field}"
        for section, part in sections.items()
        for field, about in part.get("properties", {}).items()
        # A section has its description where it is defined.
        if not about.get("description") and "$ref" not in about
    ]
    unexplained += [section for section, part in schema.get("definitions", {}).items() if not part.get("description")]
    assert unexplained == []


def test_the_form_has_enums_bounds_examples_and_sections() -> None:
    schema = schema_of("extract")
    sections = schema["definitions"]
    assert sections["DatasetConfig"]["title"] == "Dataset"
    assert sections["DatasetConfig"]["properties"]["on_too_long"]["enum"] == ["fail", "truncate", "skip"]
    assert sections["DatasetConfig"]["properties"]["max_seq_len"]["exclusiveMinimum"] == 0
    assert sections["ServerConfig"]["properties"]["port"]["maximum"] == 65535
    assert schema["properties"]["attempt"]["maximum"] == MOST_ATTEMPTS
    for section, field in (("DatasetConfig", "path"), ("ModelConfig", "path"), ("OutputConfig", "path")):
        assert sections[section]["properties"][field]["examples"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dataset": {"path": 5, "max_seq_len": 8}}, "path"),
        ({"dataset": {"path": "/data", "max_seq_len": 0}}, "max_seq_len"),
        ({"dataset": {"path": "/data", "max_seq_len": 8, "on_to_long": "skip"}}, "on_to_long"),
        ({"server": {"device": "tpu"}}, "device"),
        ({"name": "a name"}, "name"),
    ],
)
def test_wrong_parameters_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    parameters = copy.deepcopy(deployed("extract")["parameters"])
    parameters["config"] |= change
    with pytest.raises(ValidationError, match=field):
        validate(parameters, schema_of("extract"), raise_on_error=True)


def test_a_nightly_schedule_waits_to_be_switched_on() -> None:
    (schedule,) = deployed("extract")["schedules"]
    assert (schedule["slug"], schedule["active"]) == ("nightly", False)


def automations(block: str | None = None) -> dict[str, AutomationCore]:
    return {automation.name.removeprefix("drillcore: "): automation for automation in deploy.read_automations(block)}


def test_automations_are_prefect_s_and_notify_only_where_there_is_a_block() -> None:
    assert list(automations()) == [
        "silent run is crashed",
        "crashed extraction starts again",
        "crashed fleet starts again",
        "submission that never began is crashed",
    ]
    told = automations("6b2d9a58-3a3c-4f7a-9d39-0d1f3f6c2b11")
    assert len(told) == 6
    action: Any = told["tell of long pending"].actions[0]
    assert str(action.block_document_id) == "6b2d9a58-3a3c-4f7a-9d39-0d1f3f6c2b11"


def test_a_run_is_not_taken_for_dead_before_three_heartbeats_are_missing() -> None:
    trigger: Any = automations()["silent run is crashed"].trigger
    for name in NAMES:
        heartbeat = deployed(name)["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
        assert trigger.within.total_seconds() >= 3 * int(heartbeat)


@pytest.mark.parametrize(("name", "what"), [("extract", "extraction"), ("extract-fleet", "fleet")])
def test_a_restart_gives_every_parameter_of_the_flow(name: str, what: str) -> None:
    action: Any = automations()[f"crashed {what} starts again"].actions[0]
    assert set(action.parameters) == set(schema_of(name)["properties"]) - {"partition"}  # of a fleet's own runs


def settings(name: str) -> dict[str, str]:
    """An environment file's values."""
    lines = (DEPLOYMENTS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_server_s_settings_hold_what_the_command_line_s_server_has() -> None:
    found = settings("server.env")
    wanted = {name: value for name, value in PREFECT_SERVER_SETTINGS.items() if "LATE_RUNS" not in name}
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] == "prefect.server.concurrency.lease_storage.filesystem"


@pytest.mark.parametrize("name", ["server.env", "worker.env"])
def test_every_prefect_setting_exists(name: str) -> None:
    """Prefect ignores names that it does not know."""
    named = {setting for setting in settings(name) if setting.startswith("PREFECT_")}
    assert named - set(_get_settings_fields(Settings)) == set()


def test_without_a_server_the_command_says_what_to_set(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "deployments.deploy"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "No Prefect server is named. Set PREFECT_API_URL" in run.stderr


@pytest.mark.parametrize("unit", ["drillcore-prefect", "drillcore-mlflow", "drillcore-worker"])
def test_a_unit_is_one_that_systemd_takes(unit: str, tmp_path: Path) -> None:
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd-analyze is not here")
    text = (DEPLOYMENTS / "systemd" / f"{unit}.service").read_text()
    # Where the checkout and its environment are; and the order of units that this machine does not have.
    here = text.replace("/opt/drillcore/.venv/bin/python", sys.executable).replace("/opt/drillcore", str(ROOT))
    copy_of_it = tmp_path / f"{unit}.service"
    copy_of_it.write_text(here)
    verified = subprocess.run([command, "verify", str(copy_of_it)], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_compose_gives_the_worker_gpus_memory_and_time_to_end() -> None:
    services = yaml.safe_load((DEPLOYMENTS / "containers" / "compose.yaml").read_text())["services"]
    worker = services["worker"]
    assert worker["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert worker["shm_size"] == "96gb"
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    folder = DEPLOYMENTS / "containers"
    files = [folder / service["env_file"] for service in services.values() if "env_file" in service]
    assert all(file.exists() for file in files)
