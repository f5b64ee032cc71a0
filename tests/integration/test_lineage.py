"""The lineage on a real MLflow, over a database and over HTTP: what fed what, asked from both ends."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow.data
import pytest
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.tracking import MlflowClient

from flows.__main__ import main
from tasks.errors import LineageError, StoreError
from tasks.files import sha256_of
from tasks.lineage.client import DRAFTER_NAME, NOTE, STATES_DIGEST, log_all, mlflow_digest
from tasks.lineage.drafter import drafter_run
from tasks.lineage.lookup import Lineage, lineage_of_drafter, lineage_of_extraction
from tasks.lineage.sources import StoreSource
from tasks.store.layout import Store
from tasks.verification import verify_store
from tests.conftest import ROOT
from tests.faults.drill import Service, mlflow_service
from tests.integration.lineage import record, verified_store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@dataclass
class Recorded:
    """Two extractions and three drafters: `alone` was trained on the first, `both` on both, and `alone` again on the
    second, which made its version 2 and took the alias."""

    uri: str
    client: MlflowClient
    first: Store
    second: Store
    runs: list[str]
    """Ids of the extractions' runs."""

    def digest(self, store: Store) -> str:
        return sha256_of(store.manifest)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = mlflow_service(tmp_path_factory.mktemp("mlflow") / "server")
    try:
        service.start()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module", params=["sqlite", "http"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp(f"lineage-{request.param}")
    uri = request.getfixturevalue("server").url if request.param == "http" else f"sqlite:///{folder / 'mlflow.db'}"
    first, second = verified_store(folder / "one", "first"), verified_store(folder / "two", "second", "model-b")
    runs = [record(store, uri) for store in (first, second)]
    with drafter_run(first.root, "alone", "/drafters/alone-1", aliases=["champion"], uri=uri) as run:
        run.log_metrics({"acceptance_length": 2.5}, step=10)
    with drafter_run([first.root, second.root], "both", uri=uri, params={"epochs": 3}) as run:
        run.log_metrics({"acceptance_length": 3.0}, step=10)
    with drafter_run(second.root, "alone", "/drafters/alone-2", aliases=["champion"], uri=uri) as run:
        run.log_metrics({"acceptance_length": 2.75}, step=10)
    return Recorded(uri, MlflowClient(uri, uri), first, second, runs)


def fed(lineage: Lineage) -> set[tuple[str, str]]:
    """(extraction, drafter) of each edge."""
    return {(lineage.extractions[one].name, lineage.drafters[other].title) for one, other in lineage.edges}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("alone/1", {("first", "alone/1")}),
        ("alone@champion", {("second", "alone/2 @champion")}),
        ("alone", {("first", "alone/1"), ("second", "alone/2 @champion")}),
        ("both", {("first", "both/1"), ("second", "both/1")}),
    ],
)
def test_a_drafter_names_what_it_was_trained_on(
    recorded: Recorded, reference: str, expected: set[tuple[str, str]]
) -> None:
    lineage = lineage_of_drafter(reference, recorded.uri)
    assert fed(lineage) == expected
    assert lineage.unknown == []
    for extraction in lineage.extractions:
        store = {"first": recorded.first, "second": recorded.second}[extraction.name]
        assert (extraction.uri, extraction.digest) == (str(store.root), recorded.digest(store))
        assert extraction.input_uri == str(store.root.parent / "dataset.jsonl")
        assert extraction.input_sha256 == sha256_of(Path(extraction.input_uri))
        assert extraction.model == f"/models/model-{'a' if extraction.name == 'first' else 'b'}"
        assert (extraction.rows, extraction.tokens, extraction.layers) == (6, 26, "[1, 4]")


def test_an_extraction_names_the_drafters_that_it_fed(recorded: Recorded) -> None:
    store = recorded.first
    digest = recorded.digest(store)
    for reference in (str(store.root), digest, digest[:8], recorded.runs[0], "first", str(store.manifest)):
        lineage = lineage_of_extraction(reference, recorded.uri)
        asked = [one.name for one in lineage.extractions if one.run_id not in lineage.others]
        assert asked == ["first"], reference
        assert fed(lineage) == {("first", "alone/1"), ("first", "both/1"), ("second", "both/1")}
        measured = {drafter.title: drafter.metrics["acceptance_length"] for drafter in lineage.drafters}
        assert measured == {"alone/1": 2.5, "both/1": 3.0}


def test_an_input_file_names_everything_that_came_of_it(recorded: Recorded) -> None:
    dataset = recorded.first.root.parent / "dataset.jsonl"
    for reference in (str(dataset), sha256_of(dataset)[:12]):
        lineage = lineage_of_extraction(reference, recorded.uri)
        assert {one.name for one in lineage.extractions} == {"first", "second"}
        assert len(fed(lineage)) == 4


def test_a_store_that_is_gone_is_found_by_its_old_path(recorded: Recorded) -> None:
    store = recorded.second.root
    hidden = store.rename(store.with_name("elsewhere"))
    try:
        assert lineage_of_extraction(str(store), recorded.uri).extractions[0].name == "second"
        assert lineage_of_extraction(str(hidden), recorded.uri).extractions[0].name == "second"
    finally:
        hidden.rename(store)


@pytest.mark.parametrize(
    ("ask", "reference", "message"),
    [
        (lineage_of_drafter, "alon", r"No drafter is called 'alon'\. Nearest: alone"),
        (lineage_of_drafter, "alone@best", r"no alias 'best'\. Its aliases: alone@champion \(version 2\)"),
        (lineage_of_drafter, "alone/9", r"no version 9\. Its versions: 1, 2"),
        (lineage_of_drafter, "a/b/c", "NAME, NAME/VERSION or NAME@ALIAS"),
        (lineage_of_extraction, "frist", r"'frist'\. Nearest: first"),
        (lineage_of_extraction, "abcdef0123", "No recorded extraction is, read or wrote 'abcdef0123'"),
    ],
)
def test_what_is_not_known_is_answered_with_what_is(recorded: Recorded, ask: Any, reference: str, message: str) -> None:
    with pytest.raises(LineageError, match=message):
        ask(reference, recorded.uri)


def test_the_chain_by_mlflow_s_own_means_and_the_readme_s_search_strings(recorded: Recorded) -> None:
    client = recorded.client
    experiment = client.get_experiment_by_name("drillcore")
    assert experiment is not None
    version = client.get_model_version_by_alias("alone", "champion")
    training = client.get_run(version.run_id)
    (logged,) = training.inputs.dataset_inputs
    assert (logged.dataset.name, logged.tags[0].value) == ("second", "training")

    typed = [line.split("|")[1:3] for line in readme_table()]
    digest, input_digest = recorded.digest(recorded.second), sha256_of(recorded.second.root.parent / "dataset.jsonl")
    found = []
    for where, text in typed:
        query = text.strip().strip("`").replace("'D'", f"'{mlflow_digest(digest)}'").replace("%S%", f"%{digest}%")
        query = query.replace("'I'", f"'{mlflow_digest(input_digest)}'").replace(".D`", f".{mlflow_digest(digest)}`")
        if where.strip() == "runs":
            found.append(sorted(run.info.run_name for run in client.search_runs([experiment.experiment_id], query)))
        else:
            found.append(sorted(model.name for model in client.search_registered_models(query)))
    assert found == [["second"], ["alone", "both"], ["first", "second"], ["alone", "both", "second"], ["alone", "both"]]


def readme_table() -> list[str]:
    """The lines of README's table of search strings."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("| where | what is typed | what is found |") + 2
    return lines[start : lines.index("", start)]


def test_the_datasets_say_what_they_hold_and_where(recorded: Recorded) -> None:
    run = recorded.client.get_run(recorded.runs[0])
    contexts = {each.tags[0].value: each.dataset for each in run.inputs.dataset_inputs}
    states, prompts = contexts["extraction-output"], contexts["extraction-input"]
    assert (states.name, states.digest) == ("first", mlflow_digest(recorded.digest(recorded.first)))
    assert json.loads(states.source) == {"uri": str(recorded.first.root)}
    columns = {column["name"]: column["type"] for column in json.loads(states.schema)["mlflow_colspec"]}
    assert columns["aux_hidden_states: layer 4"] == "bfloat16 [tokens, 4]"
    assert columns["last_hidden_state"] == "bfloat16 [tokens, 4], post-norm"
    profile = json.loads(states.profile)
    size = sum(path.stat().st_size for path in recorded.first.shards.glob("*.safetensors"))
    assert (profile["rows"], profile["tokens"], profile["bytes"], profile["skipped"]) == (7, 26, size, 1)
    assert prompts.name == "dataset.jsonl"
    assert {"rows": 7, "tokens": 29}.items() <= json.loads(prompts.profile).items()
    # MLflow itself opens the source of the input, and ours the store, if it is as it should be.
    assert Path(mlflow.data.get_source(prompts).load()) == recorded.first.root.parent / "dataset.jsonl"
    assert StoreSource.from_json(states.source).load() == recorded.first
    with pytest.raises(LineageError, match="gs://bucket/x is not on this machine"):
        StoreSource("gs://bucket/x").load()
    assert StoreSource("s3://bucket/x")._get_source_type() == "s3"


def test_a_run_s_page_has_figures_over_time_files_and_links(recorded: Recorded) -> None:
    client, run = recorded.client, recorded.client.get_run(recorded.runs[0])
    assert run.info.status == "FINISHED"
    assert run.data.params["parts.layers"] == "[1, 4]"
    assert run.data.params["extraction.tokens_in_flight"] == "16"
    history = client.get_metric_history(run.info.run_id, "progress/tokens_per_second")
    assert [(metric.step, metric.value) for metric in history] == [(2 * at, 5.0) for at in range(1, 9)]
    rows = client.get_metric_history(run.info.run_id, "progress/rows_done")
    assert [metric.value for metric in rows] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert [m.value for m in client.get_metric_history(run.info.run_id, "progress/retries")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.data.metrics["system/cpu_utilization_percentage"] == 54.0
    assert run.data.metrics["rows_truncated"] == 1
    assert run.data.tags["mlflow.source.git.commit"] == f"{1:040x}"
    files = artifacts(client, run.info.run_id)
    assert {
        *("config.yaml", "extraction.json", "manifest.json", "ledger.parquet", "probe.json", "environment.json"),
        *("plots/throughput.svg", "plots/row-lengths.svg", "plots/rms-by-layer.svg", "store.server.log.tail.txt"),
        *("lineage.svg", "lineage.mmd", "attempts/20260920.jsonl", "attempts/20260921.jsonl"),
    } <= files
    assert "mlflow.json" not in files
    note = run.data.tags[NOTE]
    assert "[flow run](http://127.0.0.1:4200/runs/flow-run/flow-1)" in note
    (drafter,) = lineage_of_drafter("both", recorded.uri).drafters
    assert f"[both/1](#/models/both/versions/1): [training run](#/experiments/{drafter.experiment_id}/runs/" in note
    training = client.get_run(drafter.run_id)
    assert f"[first](#/experiments/{run.info.experiment_id}/runs/{run.info.run_id})" in training.data.tags[NOTE]
    assert {"lineage.svg", "lineage.mmd"} <= artifacts(client, drafter.run_id)
    assert f"runs/{run.info.run_id})" in client.get_model_version("both", "1").description


def artifacts(client: MlflowClient, run_id: str, folder: str | None = None) -> set[str]:
    """Paths of all files of a run."""
    found = set()
    for each in client.list_artifacts(run_id, folder):
        found |= artifacts(client, run_id, each.path) if each.is_dir else {each.path}
    return found


def test_the_command_answers_people_and_programs(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--tracking-uri", recorded.uri]
    assert main(["lineage", "extraction", str(recorded.first.root), *at]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"extraction first, run .* finished", printed)
    assert "drafter    both/1\n" in printed
    assert "metrics  acceptance_length 3" in printed
    assert "second" not in printed  # it fed `both`, too, but nobody asked for it
    picture = tmp_path / "graph.mmd"
    assert main(["lineage", "drafter", "both", "--json", "--picture", str(picture), *at]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in answer["extractions"]] == ["first", "second"]
    assert [[one, other] for one, other in answer["edges"]] == [
        [run, answer["drafters"][0]["run_id"]] for run in recorded.runs
    ]
    assert picture.read_text().count("-->") == 4  # one input file, two extractions, one drafter
    assert main(["lineage", "drafter", "alon", *at]) == 1
    assert "Nearest: alone" in capsys.readouterr().err
    assert main(["lineage", "drafter", "both", "--picture", str(tmp_path / "graph.png"), *at]) == 1
    assert ".svg nor .mmd" in capsys.readouterr().err


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables: making them takes seconds."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new MLflow database, whose artifacts go below the working directory."""
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{shutil.copy(empty_database, tmp_path)}"


def runs(uri: str) -> list[Run]:
    """All runs, deleted ones left out."""
    client = MlflowClient(uri, uri)
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


def test_the_command_registers_a_drafter_trained_elsewhere(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = verified_store(tmp_path / "one", "first")
    record(store, database)
    words = ["--store", str(store.root), "--name", "late", "--model-uri", "s3://drafters/late", "--alias", "best"]
    assert main(["lineage", "register", *words, "--metric", "acceptance_length=2.25", "--tracking-uri", database]) == 0
    assert "late/1" in capsys.readouterr().out
    lineage = lineage_of_drafter("late@best", database)
    assert fed(lineage) == {("first", "late/1 @best")}
    (drafter,) = lineage.drafters
    assert (drafter.uri, drafter.metrics, drafter.status) == (
        "s3://drafters/late",
        {"acceptance_length": 2.25},
        "FINISHED",
    )
    assert main(["lineage", "register", *words, "--metric", "acceptance_length", "--tracking-uri", database]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err


def test_a_store_that_is_not_what_it_says_feeds_no_drafter(tmp_path: Path, database: str) -> None:
    store = verified_store(tmp_path / "one", "first")
    shard = next(store.shards.glob("*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(bytes([good[0]]) + good[1:-1] + bytes([good[-1] ^ 1]))
    with drafter_run(store.root, "shallow", uri=database):
        pass  # the size is right: only a deep look finds it
    for spoil, deep, message in (
        (lambda: None, True, "has the checksum"),
        (lambda: shard.write_bytes(good[:-1]), False, "bytes, not"),
        (shard.unlink, False, "is gone"),
        (next(store.shards.glob("*.json")).unlink, False, "changed since it was verified"),
        (store.manifest.unlink, False, "it is not verified"),
    ):
        spoil()
        with pytest.raises(StoreError, match=message), drafter_run(store.root, "bad", uri=database, deep=deep):
            pytest.fail("the training began")
    assert [run.data.tags[DRAFTER_NAME] for run in runs(database)] == ["shallow"]


def test_a_training_that_fails_registers_nothing(tmp_path: Path, database: str) -> None:
    store = verified_store(tmp_path / "one", "first")
    record(store, database)
    with pytest.raises(ZeroDivisionError):
        train_badly(store, database)
    (drafter,) = lineage_of_extraction("first", database).drafters
    assert (drafter.title, drafter.status, drafter.metrics) == ("broken (not registered)", "FAILED", {"loss": 0.5})
    with pytest.raises(LineageError, match="No drafter is called 'broken'"):
        lineage_of_drafter("broken", database)


def train_badly(store: Store, database: str) -> None:
    with drafter_run(store.root, "broken", uri=database) as run:
        run.log_metrics({"loss": 0.5})
        assert MlflowClient(database).get_run(run.run_id).info.status == "RUNNING"
        raise ZeroDivisionError


def test_a_trainer_s_own_run_is_continued_and_not_ended(tmp_path: Path, database: str) -> None:
    store = verified_store(tmp_path / "one", "first")
    client = MlflowClient(database, database)
    own = client.create_run(client.create_experiment("trainings"), run_name="mine", tags={NOTE: "my own words"})
    with drafter_run(store.root, "mine", uri=database, run_id=own.info.run_id) as run:
        run.log_metrics({"loss": 0.25})
    found = client.get_run(own.info.run_id)
    assert found.info.status == "RUNNING"
    assert found.data.tags[NOTE].startswith("my own words\n\n")
    lineage = lineage_of_drafter("mine", database)
    assert lineage.drafters[0].run_id == own.info.run_id
    assert lineage.unknown == [mlflow_digest(sha256_of(store.manifest))]  # nobody recorded the extraction here
    record(store, database)
    assert fed(lineage_of_drafter("mine", database)) == {("first", "mine/1")}
    with pytest.raises(LineageError, match="no run 'f00'"), drafter_run(store.root, "x", uri=database, run_id="f00"):
        pytest.fail("the training began")


def test_registering_again_after_a_failure_makes_no_second_version(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when MLflow goes away at the end of a training: the error names the command that goes on with the same run."""
    store = verified_store(tmp_path / "one", "first")
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "set_registered_model_alias", refuse)
        with pytest.raises(LineageError) as failed, drafter_run(store.root, "late", uri=database, aliases=["b"]) as run:
            run.log_metrics({"loss": 0.25})
    (words,) = re.findall(r"python -m flows (lineage register .*)", str(failed.value))
    assert main([*words.split(), "--tracking-uri", database]) == 0
    (drafter,) = lineage_of_drafter("late", database).drafters
    assert (drafter.title, drafter.run_id, drafter.status) == ("late/1 @b", run.run_id, "FINISHED")
    assert drafter.metrics == {"loss": 0.25}


def refuse(*arguments: Any, **named: Any) -> None:
    raise OSError("MLflow went away")


def test_a_resumed_extraction_stays_one_run_and_its_older_drafters_are_found(tmp_path: Path, database: str) -> None:
    store = verified_store(tmp_path / "one", "first")
    first = record(store, database)
    with drafter_run(store.root, "early", uri=database):
        pass
    client = MlflowClient(database, database)
    client.set_tag(first, NOTE, f"careful with row 3\n\n{client.get_run(first).data.tags[NOTE]}")
    rewrite_a_record(store)
    assert record(store, database) == first
    with drafter_run(store.root, "later", uri=database):
        pass
    (run,) = [run for run in runs(database) if run.info.run_id == first]
    assert run.data.tags[STATES_DIGEST] == sha256_of(store.manifest)
    assert run.data.tags[NOTE].startswith("careful with row 3\n\n")
    assert run.data.tags[NOTE].count("**Hidden states**") == 1
    assert fed(lineage_of_extraction("first", database)) == {("first", "early/1"), ("first", "later/1")}
    assert fed(lineage_of_drafter("early", database)) == {("first", "early/1")}
    assert len(client.get_metric_history(first, "progress/rows_done")) == 8


def rewrite_a_record(store: Store) -> None:
    """As if the rows of a shard had been extracted anew: the manifest is another one then."""
    path = next(store.shards.glob("*.json"))
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"written": {"at": "later"}}))
    verify_store(store, store.root.parent / "dataset.jsonl", 0.0)


def test_requests_that_mlflow_s_client_sends_twice_leave_one_of_each(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an answer is lost the client sends the request again, and MLflow has done it twice."""
    store = verified_store(tmp_path / "one", "first")
    for name in ("create_run", "create_logged_model", "create_model_version"):
        monkeypatch.setattr(MlflowClient, name, twice(getattr(MlflowClient, name)))
    record(store, database)
    with drafter_run(store.root, "one", uri=database):
        pass
    assert sorted(run.info.run_name for run in runs(database)) == ["first", "one"]
    assert {run.info.status for run in runs(database)} == {"FINISHED"}
    client = MlflowClient(database, database)
    assert len(client.search_model_versions("name = 'one'")) == 1


def twice(method: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        method(*arguments, **named)
        return method(*arguments, **named)

    return call


def test_any_number_of_figures_and_parameters_is_logged(database: str) -> None:
    """MLflow refuses a call with more than 100 parameters, or 1,000 things in all."""
    client = MlflowClient(database, database)
    run_id = client.create_run(client.create_experiment("many")).info.run_id
    log_all(
        client,
        run_id,
        metrics=[Metric("m", float(at), at, at) for at in range(1700)],
        params=[Param(f"p{at}", "x") for at in range(250)],
        tags=[RunTag(f"t{at}", "x") for at in range(101)],
    )
    run = client.get_run(run_id)
    assert (len(client.get_metric_history(run_id, "m")), len(run.data.params)) == (1700, 250)
    assert {f"t{at}" for at in range(101)} <= set(run.data.tags)
