"""The config: what is wrong in it is named, with the field and what was given."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from tasks.config import ExtractConfig, describe_config, load_config, parse_config
from tasks.errors import ConfigError
from tests.unit.helpers import ROOT

MINIMAL: dict[str, Any] = {
    "name": "test",
    "dataset": {"path": "data.jsonl", "max_seq_len": 128},
    "model": {"path": "model"},
    "output": {"path": "out"},
}
PRESETS = sorted((ROOT / "deployments/configs").glob("*.yaml"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {**MINIMAL.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in (MINIMAL | changes).items()
    }


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_config(merged(changes), "test.yaml")
    return str(refused.value)


def fields_of(model: type[BaseModel]) -> list[tuple[type[BaseModel], str]]:
    """(its section's class, its name there) of every field that is no section."""
    found: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        found += fields_of(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else [(model, name)]
    return found


def test_what_is_not_given_has_a_default() -> None:
    config = parse_config(MINIMAL, "test.yaml")
    assert config.dataset.on_too_long == "fail"
    assert config.capture.layers == "eagle3"
    assert config.server.mode == "managed"
    assert config.server.host == "127.0.0.1"
    assert config.extraction.max_failed_share == 0


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    assert "datasett: unknown field; did you mean 'dataset'?" in refusal({"datasett": {}})


def test_an_unknown_field_of_a_section_is_refused_with_the_nearest_known_one() -> None:
    message = refusal({"dataset": {"max_seq_length": 4096}})
    assert "dataset.max_seq_length: unknown field; did you mean 'max_seq_len'?" in message


def test_an_unknown_field_like_no_other_is_refused_with_all_known_ones() -> None:
    message = refusal({"verify": {"zzz": 1}})
    assert "verify.zzz: unknown field; known are reextract_share, reextract_rows, argmax_share, argmax_rows." in message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.max_seq_len: Field required"):
        parse_config(MINIMAL | {"dataset": {"path": "data.jsonl"}}, "test.yaml")


def test_a_missing_section_is_named() -> None:
    with pytest.raises(ConfigError, match=r"The config test\.yaml has 1 wrong field\(s\):\n  output: Field required"):
        parse_config({name: value for name, value in MINIMAL.items() if name != "output"}, "test.yaml")


@pytest.mark.parametrize(
    ("changes", "field", "given"),
    [
        ({"dataset": {"max_seq_len": "many"}}, "dataset.max_seq_len", "'many'"),
        ({"dataset": {"max_seq_len": 0}}, "dataset.max_seq_len", "0"),
        ({"dataset": {"on_too_long": "cut"}}, "dataset.on_too_long", "'cut'"),
        ({"dataset": {"on_invalid": "truncate"}}, "dataset.on_invalid", "'truncate'"),
        ({"capture": {"layers": "eagle2"}}, "capture.layers", "'eagle2'"),
        ({"capture": {"final_norm": "before"}}, "capture.final_norm", "'before'"),
        ({"capture": {"layer_convention": "hf"}}, "capture.layer_convention", "'hf'"),
        ({"server": {"port": 70000}}, "server.port", "70000"),
        ({"server": {"dtype": "int8"}}, "server.dtype", "'int8'"),
        ({"staging": {"max_bytes": -1}}, "staging.max_bytes", "-1"),
        ({"extraction": {"attempts": 0}}, "extraction.attempts", "0"),
        ({"extraction": {"max_failed_share": 1.0}}, "extraction.max_failed_share", "1.0"),
        ({"verify": {"reextract_share": 1.5}}, "verify.reextract_share", "1.5"),
        ({"name": "a b"}, "name", "'a b'"),
        ({"name": "../out"}, "name", "'../out'"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_given(changes: dict[str, Any], field: str, given: str) -> None:
    message = refusal(changes)
    assert any(line.startswith(f"  {field}") and f"(given: {given})" in line for line in message.splitlines()), message


def test_all_wrong_fields_are_listed_together() -> None:
    message = refusal({"server": {"port": -1, "prot": 1}, "name": ""})
    assert "3 wrong field(s)" in message
    assert [field in message for field in ("  server.port: ", "  server.prot: ", "  name: ")] == [True] * 3


def test_paths_mean_the_same_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = parse_config(merged({"output": {"path": "~/out"}}), "test.yaml")
    assert config.dataset.path == tmp_path / "data.jsonl"
    assert config.model.path == tmp_path / "model"
    assert config.output.path == Path("/home/somebody/out")


def test_attached_needs_a_url() -> None:
    assert "server.mode is 'attached', so server.url must be set" in refusal({"server": {"mode": "attached"}})
    config = parse_config(merged({"server": {"mode": "attached", "url": "http://x:1"}}), "test.yaml")
    assert config.server.url == "http://x:1"


def test_a_config_does_not_change_after_reading() -> None:
    config = parse_config(MINIMAL, "test.yaml")
    with pytest.raises(ValueError, match="frozen"):
        config.dataset.max_seq_len = 1


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_load(preset: Path) -> None:
    assert load_config(preset).name == preset.stem


def test_there_are_the_presets() -> None:
    assert [path.name for path in PRESETS] == ["demo.yaml", "drafter.yaml", "kimi-k2.5.yaml"]


def test_overrides_win_over_the_file(path: Path) -> None:
    overrides = [
        "dataset.max_seq_len=64",
        "server.arguments=[--a, '1']",
        "capture.layers=[0, 2]",
        "name=other",
        "extraction.max_failed_share=0.5",
        "name=last",
    ]
    config = load_config(path, overrides)
    assert config.dataset.max_seq_len == 64
    assert config.dataset.path == Path("data.jsonl").absolute()
    assert config.server.arguments == ["--a", "1"]
    assert config.capture.layers == [0, 2]
    assert config.extraction.max_failed_share == 0.5
    assert config.name == "last"


def test_an_override_may_hold_an_equals_sign(path: Path) -> None:
    assert load_config(path, ["model.path=/a=b"]).model.path == Path("/a=b")


@pytest.mark.parametrize("override", ["dataset.max_seq_len", "", "=3", "dataset.=3"])
def test_an_override_of_another_form_is_refused(path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set '.*' is not of the form section\.field=value"):
        load_config(path, [override])


def test_an_override_below_a_value_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="'name' is a value in the config, not a section"):
        load_config(path, ["name.first=x"])


def test_an_override_of_an_unknown_field_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.prot: unknown field; did you mean 'port'\?"):
        load_config(path, ["server.prot=1"])


def test_an_override_that_is_no_yaml_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set 'capture\.layers=\[1, 2': the value is not valid YAML"):
        load_config(path, ["capture.layers=[1, 2"])


def test_environment_variables_are_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_FOLDER", "/mnt/data")
    text = path.read_text().replace("data.jsonl", "$DATA_FOLDER/a.jsonl").replace("path: out", "path: ${DATA_FOLDER}/o")
    path.write_text(text)
    config = load_config(path)
    assert config.dataset.path == Path("/mnt/data/a.jsonl")
    assert config.output.path == Path("/mnt/data/o")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [1", "is not valid YAML"),
        ("", "is empty or not a mapping"),
        ("- 1", "is empty or not a mapping"),
    ],
)
def test_a_file_that_is_no_config_is_refused(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("section", "field"), fields_of(ExtractConfig), ids=lambda part: getattr(part, "__name__", part)
)
def test_every_field_has_a_description_that_is_printed(section: type[BaseModel], field: str) -> None:
    info = section.model_fields[field]
    assert info.description
    assert info.description in describe_config()
    assert [field] in [line.split()[:1] for line in describe_config().splitlines()]


def test_every_section_is_printed_with_its_meaning() -> None:
    text = describe_config()
    for name, field in ExtractConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            assert kind.__doc__
            assert f"{name}: {kind.__doc__}" in text
