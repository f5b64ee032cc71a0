"""Bad input on the command line: a clear error that names the row or field, exit code 2, nothing written or started."""

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from safetensors.torch import save_file

from flows import dataset_options, run
from flows.__main__ import main
from flows.export import ExportConfig
from flows.summary import FleetSummary, Summary
from tasks.export.formats import FORMATS
from tasks.fleet.settings import FleetConfig
from tasks.store.layout import Store, create_store

VOCAB = 100


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A config for a tiny checkpoint and a good dataset; its server would be this interpreter's."""
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": VOCAB, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(shape))
    save_file({"lm_head.weight": torch.zeros(VOCAB, 16)}, model / "model.safetensors")
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    return {
        "name": "test",
        "dataset": {"path": str(dataset), "max_seq_len": 8},
        "model": {"path": str(model)},
        "server": {"device": "cpu"},
        "staging": {"path": str(tmp_path / "staging")},
        "output": {"path": str(tmp_path / "output")},
    }


def plan(values: dict[str, Any], tmp_path: Path, *options: str) -> int:
    """Exit code of `plan`, which checks all that `extract` checks before it starts anything."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    return main(["plan", str(config), *options])


def test_good_input_is_planned_and_nothing_is_written(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(values, tmp_path, "--rate", "10") == 0
    printed = capsys.readouterr().out
    # 3 tokens of (3 + 1 states) x 16 x 2 bytes, id and mask
    assert f"{3 * (4 * 16 * 2 + 5):,} (399 B) in 1 shards" in printed
    assert "0.3 s for 3 tokens at 10/s" in printed
    assert not (tmp_path / "output").exists()
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "dataset.jsonl does not exist (dataset.path)"),
        ("", "dataset.jsonl is empty (dataset.path)"),
        ('{"input_ids": [1]}\n{"input_ids": [1,\n', "line 2 (row 1): invalid JSON"),
        ('{"text": "x"}\n', "line 1 (row 0): no input_ids; the line has 'text'"),
        ('{"input_ids": [1, 100]}\n', "line 1 (row 0): input_ids[1] is 100, the model's vocabulary has ids 0 to 99"),
        ('{"input_ids": []}\n', "line 1 (row 0): input_ids is empty"),
        (
            '{"input_ids": [1, 2], "loss_mask": [1]}\n',
            "line 1 (row 0): loss_mask has 1 values, input_ids has 2",
        ),
        ('{"input_ids": [1, 1, 1, 1, 1, 1, 1, 1, 1]}\n', "line 1 (row 0): 9 tokens, max_seq_len is 8"),
    ],
)
def test_a_bad_dataset_is_refused_by_line(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    dataset = Path(values["dataset"]["path"])
    dataset.unlink() if content is None else dataset.write_text(content)
    assert plan(values, tmp_path) == 2
    assert message in capsys.readouterr().err


def test_policies_let_the_rest_pass_with_counts(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [1] * 9}, {"input_ids": []}, {"input_ids": [5, 6]}]
    Path(values["dataset"]["path"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    values["dataset"] |= {"on_too_long": "truncate", "on_invalid": "skip"}
    assert plan(values, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "3: 1 truncated, 1 skipped" in printed
    assert "10; longest row 8, max_seq_len 8" in printed


def test_no_room_on_the_output(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with states of a terabyte a token: no disk has room."""
    shape = json.loads((tmp_path / "model/config.json").read_text()) | {"hidden_size": 1 << 37}
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    assert plan(values, tmp_path) == 2
    errors = capsys.readouterr().err
    assert f"SpaceError: The output {tmp_path / 'output'} has " in errors
    assert "3 tokens need 3.0 TiB" in errors


def test_no_room_in_the_staging(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values["staging"]["max_bytes"] = 700  # the row needs 2 x 399
    assert plan(values, tmp_path) == 2
    errors = capsys.readouterr().err
    assert f"SpaceError: The staging {tmp_path / 'staging'} may hold 700 B" in errors
    assert "the longest row, 3 tokens, needs 798 B" in errors


def test_a_port_in_use_is_refused_with_the_pid(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        values["server"]["port"] = port
        assert plan(values, tmp_path) == 2
    assert f"Port {port} on 127.0.0.1 cannot be used: process {os.getpid()} listens on it" in capsys.readouterr().err


def test_an_interpreter_without_sglang_is_refused(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(sys.base_prefix) / "bin/python3"
    values["server"]["interpreter"] = str(base)
    assert plan(values, tmp_path) == 2
    assert f"The interpreter {base} has no SGLang" in capsys.readouterr().err


def test_an_interpreter_with_another_version_is_refused(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A made-up SGLang on the interpreter's path: the real old versions need environments of gigabytes."""
    package = tmp_path / "site/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    information = tmp_path / "site/sglang-0.4.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.1\n")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.base_prefix}/bin/python3 "$@"\n')
    interpreter.chmod(0o755)
    values["server"]["interpreter"] = str(interpreter)
    assert plan(values, tmp_path) == 2
    errors = capsys.readouterr().err
    assert f"SGLang 0.4.1 of {interpreter} is not supported" in errors
    assert "0.5.23" in errors


def test_another_extractions_output_is_refused_field_by_field(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_store(Store(tmp_path / "output"), {"layers": [1, 2], "dtype": "bfloat16"}, {})
    assert plan(values, tmp_path) == 2
    errors = capsys.readouterr().err
    assert "belongs to another extraction; these fields differ" in errors
    assert "layers: the output has [1, 2], this run has [1, 3, 4]" in errors
    assert "  dtype:" not in errors


def test_an_unknown_field_is_refused_with_the_nearest_known_one(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["dataset"]["max_seq_length"] = 8
    assert plan(values, tmp_path) == 2
    assert "dataset.max_seq_length: unknown field; did you mean 'max_seq_len'?" in capsys.readouterr().err


def test_verifying_a_directory_that_is_no_store_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 1
    assert "holds no extraction: there is no extraction.json" in capsys.readouterr().err


def failed_summary(tmp_path: Path, failed: int) -> Summary:
    return Summary(
        rows={"done": 5, "truncated": 0, "skipped": 0, "failed": failed},
        tokens=15,
        bytes=1234,
        shards=3,
        digest="d" * 64,
        output=tmp_path / "output",
        extracted_rows=5,
        extracted_tokens=15,
        seconds=1.0,
        usage=dict.fromkeys(("full", "starved", "blocked", "lost", "behind", "requests", "tokens"), 0.25),
        reextracted=0,
        mlflow_run=None,
    )


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        (["extract"], {"only_failed": False, "deep": False}),
        (["extract", "--deep"], {"only_failed": False, "deep": True}),
        (["retry-failed"], {"only_failed": True, "deep": False}),
    ],
    ids=" ".join,
)
def test_each_command_starts_the_flow_for_its_rows_and_says_what_failed(
    values: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    parameters: dict[str, bool],
) -> None:
    started: list[dict[str, bool]] = []

    def pretend_to_run(flow: Any, config: Any, port: int | None, **parameters: bool) -> Summary:
        started.append(parameters)
        return failed_summary(tmp_path, failed=1)

    monkeypatch.setattr(run, "run_with_prefect", pretend_to_run)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    command, *options = arguments
    assert main([command, str(config), *options]) == 0
    assert started == [parameters]
    printed = capsys.readouterr().out
    assert f"failed     1 rows; the reasons are in {tmp_path / 'output/ledger.parquet'}" in printed
    assert f"to try them again: python -m flows retry-failed {config}" in printed


def test_a_fleet_gets_its_nodes_and_says_what_it_came_to(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[FleetConfig] = []

    def pretend_to_run(flow: Any, config: Any, port: int | None, fleet: FleetConfig) -> FleetSummary:
        started.append(fleet)
        kept = {
            name: getattr(failed_summary(tmp_path, failed=0), name) for name in ("rows", "tokens", "bytes", "shards")
        }
        facts = {"digest": "d" * 64, "output": tmp_path / "output", "mlflow_run": None, **kept}
        return FleetSummary(**facts, nodes=2, partitions=3, retries=1, extracted_tokens=150, seconds=2.0)

    monkeypatch.setattr(run, "run_with_prefect", pretend_to_run)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    arguments = ["fleet", str(config), "--node", "node-a", "--node", "node-b", "--partitions", "3"]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert main(arguments) == 0
    assert ([node.queue for node in started[0].nodes], started[0].count) == (["node-a", "node-b"], 3)
    printed = capsys.readouterr().out
    assert "3 partitions on 2 nodes: 75 tokens/s, 1 runs were lost or failed and made up for" in printed


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (["--node", "node-a"], "A fleet needs the Prefect API that its nodes' workers ask for work"),
        ([], "nodes: List should have at least 1 item"),
    ],
)
def test_a_fleet_without_nodes_or_a_prefect_server_is_refused(
    values: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    with temporary_settings({PREFECT_API_URL: None}):
        assert main(["fleet", str(config), *nodes]) == 2
    assert message in capsys.readouterr().err


def test_a_summary_says_where_the_server_s_time_went(tmp_path: Path) -> None:
    text = failed_summary(tmp_path, failed=0).text(Path("config.yaml"))
    assert (
        "25.0% full, 25.0% with room for more, 25.0% waiting for staging, 25.0% lost, 25.0% with its writers behind"
        in text
    )


def test_a_summary_without_failures_names_no_retry(tmp_path: Path) -> None:
    assert "retry-failed" not in failed_summary(tmp_path, failed=0).text(Path("config.yaml"))


PREPARE = ["prepare", "a.jsonl", "--tokenizer", "model", "--max-seq-len", "8", "--out", "out.jsonl"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--template-variable", "x"], "--template-variable 'x' is not of the form NAME=VALUE"),
        (["--template-variable", "a b=1"], "--template-variable 'a b=1' is not of the form NAME=VALUE"),
        (["--max-seq-len", "0"], "max_seq_len"),
        (["--workers", "0"], "workers"),
    ],
)
def test_wrong_arguments_of_prepare_are_refused(
    capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main([*PREPARE, *more]) == 2
    assert message in capsys.readouterr().err


def test_arguments_of_prepare_become_its_config() -> None:
    parser = argparse.ArgumentParser()
    dataset_options.add_prepare_options(parser)
    more = ["--template-variable", "thinking=false", "--template-variable", "date=today", "--no-shuffle", "--seed", "3"]
    config = dataset_options.prepare_config(parser.parse_args([*PREPARE[1:], *more]))
    assert config.template_variables == {"thinking": False, "date": "today"}
    assert (config.shuffle, config.seed, config.deduplicate, config.on_too_long) == (False, 3, True, "truncate")
    assert config.sources == [Path("a.jsonl").absolute()]


def test_every_format_can_be_asked_for() -> None:
    assert set(dataset_options.EXPORTS) == set(FORMATS)
    assert set(get_args(ExportConfig.model_fields["to"].annotation)) == set(FORMATS)
