"""What a Prefect server makes of our deployments and automations. No worker: runs are only said to have crashed."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.extract import MOST_ATTEMPTS
from tests.conftest import ROOT
from tests.faults.drill import wait_until
from tests.faults.operated import Operated

CONFIG: dict[str, Any] = {
    "name": "test",
    "dataset": {"path": "/data/dataset.jsonl", "max_seq_len": 8},
    "model": {"path": "/data/model"},
    "output": {"path": "/data/output"},
}


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Operated.cold(tmp_path_factory.mktemp("operated")) as operated:
        operated.deploy()
        yield operated


def test_crashes_are_followed_by_so_many_attempts_and_no_more(operated: Operated) -> None:
    """No worker: the runs are only said to have crashed."""
    flow_run = operated.submit("extract", CONFIG)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        runs = operated.attempts(flow_run)
        assert [run["parameters"]["attempt"] for run in runs] == list(range(1, attempt + 1))
        operated.set_state(runs[-1]["id"], "CRASHED")
        if attempt < MOST_ATTEMPTS:
            wait_until(lambda attempt=attempt: len(operated.attempts(flow_run)) > attempt, 30, "the next attempt")
    refused = {"filter": {"event": {"name": ["prefect.automation.action.failed"]}}}

    def said() -> str:
        return str(operated.post("events/filter", refused)["events"])

    wait_until(
        lambda: f"{MOST_ATTEMPTS + 1} is greater than the maximum of {MOST_ATTEMPTS}" in said(), 30, "the refusal"
    )
    assert len(operated.attempts(flow_run)) == MOST_ATTEMPTS


def test_a_crashed_fleet_is_started_again_with_its_nodes(operated: Operated) -> None:
    fleet = {"nodes": [{"queue": "node-a"}, {"queue": "node-b", "settings": {"server": {"count": 2}}}]}
    flow_run = operated.submit("extract-fleet", {**CONFIG, "output": {"path": "/data/of-a-fleet"}}, fleet=fleet)
    operated.set_state(flow_run, "CRASHED")
    wait_until(lambda: len(operated.attempts(flow_run)) > 1, 30, "the next attempt")
    again = operated.attempts(flow_run)[1]
    assert (again["parameters"]["attempt"], again["parameters"]["fleet"]["nodes"]) == (2, fleet["nodes"])
    assert again["deployment_id"] == operated.deployments["extract-fleet"]
    operated.set_state(again["id"], "CANCELLED")


def test_wrong_parameters_are_refused_at_deploy_and_at_run(operated: Operated, tmp_path: Path) -> None:
    text = (ROOT / "prefect.yaml").read_text()
    bad = tmp_path / "prefect.yaml"
    bad.write_text(text.replace("max_seq_len: 8192", "max_seq_len: none", 1))
    run = operated.run("prefect", "--no-prompt", "deploy", "--name", "extract", "--prefect-file", str(bad))
    assert run.wait(120) == 1
    said = " ".join((run.out + run.err).split())
    assert "config.dataset.max_seq_len" in said
    assert "'none' is not of type 'integer'" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"dataset": {"path": 5, "max_seq_len": 8}},
            "'config.dataset.path'. Failure reason: 5 is not of type 'string'",
        ),
        (
            {"server": {"port": 70000}},
            "'config.server.port'. Failure reason: 70000 is greater than the maximum of 65535",
        ),
        ({"server": {"prot": 1}}, "'config.server'. Failure reason: Additional properties are not allowed ('prot' was"),
    ],
)
def test_a_run_with_wrong_parameters_is_refused(operated: Operated, change: dict[str, Any], said: str) -> None:
    url = f"{operated.api}/deployments/{operated.deployments['extract']}/create_flow_run"
    answer = httpx.post(url, json={"parameters": {"config": CONFIG | change}}, timeout=30)
    assert answer.status_code == 409
    assert said in answer.json()["detail"]


def test_what_was_set_on_the_page_outlives_the_next_deploy(operated: Operated) -> None:
    deployment = operated.deployments["extract"]
    (nightly,) = operated.get(f"deployments/{deployment}")["schedules"]
    assert (nightly["slug"], nightly["active"]) == ("nightly", False)
    url = f"{operated.api}/deployments/{deployment}/schedules"
    changed = {"active": True, "parameters": {"deep": True}, "schedule": {"cron": "30 2 * * *", "timezone": "UTC"}}
    httpx.patch(f"{url}/{nightly['id']}", json=changed, timeout=30).raise_for_status()
    own = {"active": True, "parameters": {"only_failed": True}, "schedule": {"cron": "0 5 * * *", "timezone": "UTC"}}
    httpx.post(url, json=[own], timeout=30).raise_for_status()
    paused = operated.post("automations/filter", {})[0]
    httpx.patch(f"{operated.api}/automations/{paused['id']}", json={"enabled": False}, timeout=30).raise_for_status()
    count = len(operated.post("automations/filter", {}))

    operated.deploy()
    schedules = operated.get(f"deployments/{deployment}")["schedules"]
    kept = {one["schedule"]["cron"]: (one["slug"], one["active"], one["parameters"]) for one in schedules}
    assert kept == {"30 2 * * *": ("nightly", True, {"deep": True}), "0 5 * * *": (None, True, {"only_failed": True})}
    automations = operated.post("automations/filter", {})
    assert len(automations) == count
    assert [one["name"] for one in automations if not one["enabled"]] == [paused["name"]]


def test_extractions_and_others_have_queues_with_limits_of_their_own(operated: Operated) -> None:
    queues = operated.post("work_pools/drillcore/queues/filter", {})
    limits = {queue["name"]: queue["concurrency_limit"] for queue in queues}
    assert limits == {"default": None, "gpu": 1, "cpu": 8}
    assert operated.get("work_pools/drillcore")["concurrency_limit"] == 9


def test_a_crash_is_told_where_notify_says(operated: Operated) -> None:
    heard: list[bytes] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        block = CustomWebhookNotificationBlock(
            name="operators",
            url=f"http://127.0.0.1:{server.server_port}/",
            json_data={"text": "{{subject}}: {{body}}"},
            allow_private_urls=True,
        )
        with temporary_settings({PREFECT_API_URL: operated.api}):
            block.save("operators")
        run = operated.run("deployments.deploy", "--notify", "custom-webhook/operators")
        assert run.wait(120) == 0, run.out + run.err
        flow_run = operated.submit("extract", CONFIG, attempt=MOST_ATTEMPTS)
        operated.set_state(flow_run, "CRASHED")
        wait_until(lambda: bool(heard), 60, "the notification")
        server.shutdown()
    name = operated.get(f"flow_runs/{flow_run}")["name"]
    assert f"drillcore: {name} is Crashed".encode() in heard[0]


def test_a_notification_block_that_is_not_there_is_named(operated: Operated) -> None:
    run = operated.run("deployments.deploy", "--notify", "slack-webhook/nobody")
    assert run.wait(120) == 2
    assert "has no block slack-webhook/nobody (--notify)" in run.err
