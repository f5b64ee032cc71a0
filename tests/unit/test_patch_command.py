"""`python -m flows patch`: in and out of an environment without a trace, idempotent, loud about what it cannot do."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows import patch
from flows.__main__ import main
from tasks.errors import ProbeError
from tasks.patching import environment as environment_module
from tasks.patching import manifest as manifest_module
from tasks.patching import plugin as plugin_module
from tasks.patching import prove
from tasks.patching.environment import State, inspect_site, install_plugin, remove_plugin
from tasks.patching.manifest import load_manifest, manifest_line
from tasks.patching.plugin import plugin_modules, plugin_version
from tasks.patching.proofs import list_proofs
from tasks.probe import ProbeReport
from tests.unit.helpers import ROOT
from tests.unit.pretend_sglang import (
    LLAMA,
    VERSION,
    Environment,
    edit,
    listing,
    make_environment,
    write_manifest,
    write_sglang,
)

MODULE = "drillcore_capture.py"
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
REPORT = ProbeReport(
    prompts=13, tokens=900, seconds=1.5, chunks=2, noise=[0.0, 0.1], top_token_agreement=0.99, positions=106
)
LOAD = """
import importlib.metadata
for point in importlib.metadata.entry_points(group="sglang.srt.plugins"):
    try:
        point.load()
    except ImportError as error:  # there is no torch; the bytecode is written before
        print(error.name)
"""


@pytest.fixture(autouse=True)
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest lists the pretend SGLang, and there are no proofs."""
    write_manifest(tmp_path / "manifest.json", tmp_path / "published")
    monkeypatch.setattr(manifest_module, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path / "state"))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment of somebody else, with the pretend SGLang."""
    environment = make_environment(tmp_path / "environment")
    write_sglang(environment.site)
    return environment


@pytest.fixture
def other_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes `patches/` hold another version of the plugin from then on."""

    def replace() -> None:
        folder = tmp_path / "capture"
        shutil.copytree(plugin_module.CAPTURE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (dist_info,) = folder.glob("*.dist-info")
        dist_info.rename(folder / "drillcore_capture-99.dist-info")
        (folder / MODULE).write_text("import torch  # another one\n")
        monkeypatch.setattr(plugin_module, "CAPTURE", folder)

    return replace


def run(*arguments: str) -> int:
    return main(["patch", *arguments])


def dist_info(environment: Environment) -> Path:
    return environment.site / f"drillcore_capture-{plugin_version()}.dist-info"


# On the path of a managed server


@pytest.mark.parametrize("action", ["apply", "verify", "status"])
def test_without_an_interpreter_the_folders_for_the_path_are_named(
    action: str, environment: Environment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", environment.python)
    before = listing(environment.folder)
    assert run(action) == 0
    printed = capsys.readouterr().out
    assert f"SGLang     {VERSION} in {environment.site}/sglang, as listed in patches/manifest.json" in printed
    assert f"path       {ROOT}/patches/capture\n" in printed
    assert f"{ROOT}/patches/cpu (only without a GPU)" in printed
    assert listing(environment.folder) == before


@pytest.mark.parametrize("action", ["apply", "verify"])
def test_without_an_interpreter_an_edited_sglang_is_refused(
    action: str, environment: Environment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", environment.python)
    edit(environment.site / "sglang", "srt/models/llama.py", "# one after the other", "# edited")
    assert run(action) == 2
    assert f"the source of {LLAMA} differs" in capsys.readouterr().err


def test_without_an_interpreter_there_is_nothing_to_undo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("revert") == 0
    assert "nothing to undo: a managed server gets it through PYTHONPATH" in capsys.readouterr().out


# In somebody else's environment


def test_an_environment_is_byte_for_byte_as_before(environment: Environment) -> None:
    before = listing(environment.folder)
    assert run("apply", "--interpreter", environment.python) == 0
    assert environment.run(LOAD) == "torch"
    assert list((environment.site / "__pycache__").glob("drillcore_capture.*.pyc"))
    assert listing(environment.folder) != before
    assert run("revert", "--interpreter", environment.python) == 0
    assert listing(environment.folder) == before


@pytest.mark.parametrize("content", [{}, {"other.cpython-311.pyc": b"x"}], ids=["empty", "in use"])
def test_a_bytecode_folder_that_was_there_before_stays(environment: Environment, content: dict[str, bytes]) -> None:
    (environment.site / "__pycache__").mkdir()
    for name, data in content.items():
        (environment.site / "__pycache__" / name).write_bytes(data)
    before = listing(environment.folder)
    install_plugin(environment.site)
    environment.run(LOAD)
    remove_plugin(environment.site)
    assert listing(environment.folder) == before


def test_bytecode_that_others_wrote_meanwhile_stays(environment: Environment) -> None:
    install_plugin(environment.site)
    environment.run(LOAD)
    (environment.site / "__pycache__/other.cpython-311.pyc").write_bytes(b"x")
    remove_plugin(environment.site)
    assert [path.name for path in (environment.site / "__pycache__").iterdir()] == ["other.cpython-311.pyc"]


def test_all_of_the_plugin_is_installed(environment: Environment) -> None:
    install_plugin(environment.site)
    for module in plugin_modules():
        assert (environment.site / module.name).read_bytes() == module.read_bytes()
    for name in ("METADATA", "entry_points.txt"):
        assert (dist_info(environment) / name).read_bytes() == (plugin_module.plugin_dist_info() / name).read_bytes()


def test_pip_lists_it_and_can_uninstall_it(environment: Environment) -> None:
    def pip(*arguments: str) -> str:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment.python]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout

    before = listing(environment.folder)
    install_plugin(environment.site)
    assert f"drillcore-capture=={plugin_version()}\n" in pip("list", "--format", "freeze")
    assert "Installer: drillcore\n" in pip("show", "--verbose", "drillcore-capture")
    pip("uninstall", "--yes", "drillcore-capture")
    assert listing(environment.folder) == before


def test_applying_twice_changes_nothing(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in environment.site.rglob("*")}

    assert run("apply", "--interpreter", environment.python) == 0
    assert f"installed into {environment.site}" in capsys.readouterr().out
    before = times()
    assert run("apply", "--interpreter", environment.python) == 0
    assert f"is in {environment.site} already, nothing was changed" in capsys.readouterr().out
    assert times() == before


def test_reverting_twice_says_that_there_is_nothing_to_undo(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    run("apply", "--interpreter", environment.python)
    assert run("revert", "--interpreter", environment.python) == 0
    assert f"removed from {environment.site}, which is as before" in capsys.readouterr().out
    assert run("revert", "--interpreter", environment.python) == 0
    assert f"nothing to undo: it is not in {environment.site}" in capsys.readouterr().out


def test_an_outdated_one_is_replaced_without_a_trace(
    environment: Environment, other_plugin: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(environment.folder)
    install_plugin(environment.site)
    environment.run(LOAD)
    other_plugin()
    assert inspect_site(environment.site).state is State.OUTDATED
    assert run("verify", "--interpreter", environment.python) == 2
    assert "is outdated. `python -m flows patch apply --interpreter" in capsys.readouterr().err
    assert run("apply", "--interpreter", environment.python) == 0
    assert f"version 99: replaced an older one in {environment.site}" in capsys.readouterr().out
    assert run("verify", "--interpreter", environment.python) == 0
    assert {path.name for path in environment.site.glob("drillcore*")} == {MODULE, "drillcore_capture-99.dist-info"}
    remove_plugin(environment.site)
    assert listing(environment.folder) == before


def test_an_outdated_one_can_be_removed(environment: Environment, other_plugin: Callable[[], None]) -> None:
    before = listing(environment.folder)
    install_plugin(environment.site)
    other_plugin()
    assert remove_plugin(environment.site) is State.OUTDATED
    assert listing(environment.folder) == before


def test_an_environment_can_be_reverted_after_its_sglang_is_gone(environment: Environment) -> None:
    install_plugin(environment.site)
    shutil.rmtree(environment.site / "sglang")
    assert run("revert", "--interpreter", environment.python) == 0
    assert inspect_site(environment.site).state is State.ABSENT


def test_asking_an_interpreter_leaves_no_bytecode(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment.site / "hook.pth").write_text("import hooked\n")
    (environment.site / "hooked.py").write_text("")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    before = listing(environment.folder)
    assert run("status", "--interpreter", environment.python) == 0
    assert listing(environment.folder) == before


# What drillcore did not write is left alone


def spoil_module(environment: Environment) -> Path:
    path = environment.site / MODULE
    path.write_bytes(path.read_bytes() + b"# mine\n")
    return path


def spoil_entry_points(environment: Environment) -> Path:
    path = dist_info(environment) / "entry_points.txt"
    path.write_text("[sglang.srt.plugins]\n")
    return path


def add_file(environment: Environment) -> Path:
    path = dist_info(environment) / "notes.txt"
    path.write_text("mine")
    return path


def add_version(environment: Environment) -> Path:
    path = environment.site / "drillcore_capture-0.dist-info"
    path.mkdir()
    return path


def add_outside_path(environment: Environment) -> Path:
    record = dist_info(environment) / "RECORD"
    record.write_text(record.read_text() + "../../../bin/python,,\n")
    return record


def leave_module_without_record(environment: Environment) -> Path:
    for path in dist_info(environment).iterdir():
        path.unlink()
    return environment.site / MODULE


def replace_by_own(environment: Environment) -> Path:
    remove_plugin(environment.site)
    path = environment.site / MODULE
    path.write_text("mine")
    return path


@pytest.mark.parametrize("action", ["apply", "verify", "revert"])
@pytest.mark.parametrize(
    "change",
    [
        spoil_module,
        spoil_entry_points,
        add_file,
        add_version,
        add_outside_path,
        leave_module_without_record,
        replace_by_own,
    ],
)
def test_changed_files_are_refused_by_name_and_left_alone(
    action: str, change: Callable[[Environment], Path], environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin(environment.site)
    changed = change(environment)
    before = listing(environment.folder)
    assert run(action, "--interpreter", environment.python) == 2
    message = capsys.readouterr().err
    assert "Not as drillcore installed it, and left alone: " in message
    assert str(changed) in message
    assert "delete it there, and try again" in message
    assert listing(environment.folder) == before
    assert run("status", "--interpreter", environment.python) == 0
    assert f"modified in {environment.site}: " in capsys.readouterr().out


def test_a_changed_file_that_was_deleted_is_healed(environment: Environment) -> None:
    before = listing(environment.folder)
    install_plugin(environment.site)
    spoil_module(environment).unlink()
    assert inspect_site(environment.site).state is State.HALF_DONE
    assert run("apply", "--interpreter", environment.python) == 0
    assert run("verify", "--interpreter", environment.python) == 0
    remove_plugin(environment.site)
    assert listing(environment.folder) == before


# Cut short


def killed_at(step: int, action: Callable[[Path], object], site: Path) -> bool:
    """Run `action(site)` in a process that is killed just before its step-th change of the file system.

    Returns whether it was: False once there are fewer steps.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                seen += 1
                if seen == step:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            action(site)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("heal", [install_plugin, remove_plugin])
@pytest.mark.parametrize("action", [install_plugin, remove_plugin])
def test_a_kill_at_any_moment_is_healed_and_never_leaves_a_half_loaded_plugin(
    action: Callable[[Path], object], heal: Callable[[Path], object], environment: Environment
) -> None:
    before = listing(environment.folder)
    install_plugin(environment.site)
    environment.run(LOAD)
    complete = listing(environment.site)
    step = 1
    while True:
        remove_plugin(environment.site)
        if action is remove_plugin:
            install_plugin(environment.site)
            environment.run(LOAD)
        if not killed_at(step, action, environment.site):
            break
        state = inspect_site(environment.site).state
        assert state in (State.ABSENT, State.HALF_DONE, State.APPLIED)
        if (dist_info(environment) / "entry_points.txt").exists():
            assert state is State.APPLIED
        heal(environment.site)
        expected = State.APPLIED if heal is install_plugin else State.ABSENT
        assert inspect_site(environment.site).state is expected
        remains = set(listing(environment.site)) - set(complete)
        assert remains == set()
        remove_plugin(environment.site)
        assert listing(environment.folder) == before
        step += 1
    assert step > 8


def test_a_half_done_install_is_named(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    assert killed_at(6, install_plugin, environment.site)
    assert run("status", "--interpreter", environment.python) == 0
    assert f"half done in {environment.site}" in capsys.readouterr().out
    assert run("verify", "--interpreter", environment.python) == 2
    assert f"The capture plugin in {environment.site} is half done. `python -m flows" in capsys.readouterr().err
    assert run("apply", "--interpreter", environment.python) == 0
    assert f"finished what was begun in {environment.site}" in capsys.readouterr().out


# Refused environments


def test_a_folder_that_cannot_be_written_is_named(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An interpreter that installs into a folder in which not even root can make one.
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$3" in *purelib*) echo \'"/sys"\';; *) exec {environment.python} "$@";; esac\n'
    )
    python.chmod(0o755)
    assert run("apply", "--interpreter", str(python)) == 2
    message = capsys.readouterr().err
    assert f"/sys/drillcore_capture-{plugin_version()}.dist-info cannot be written: " in message
    assert "Run this as the owner of the environment" in message


@pytest.mark.parametrize("action", ["apply", "verify", "status", "revert"])
def test_an_interpreter_that_is_missing_is_named(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(action, "--interpreter", "/no/python") == 2
    assert "The interpreter /no/python cannot be run" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["apply", "verify"])
def test_an_interpreter_without_sglang_is_refused(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make_environment(tmp_path / "bare")
    before = listing(bare.folder)
    assert run(action, "--interpreter", bare.python) == 2
    assert f"{bare.python} has no SGLang. Install one of {VERSION} there" in capsys.readouterr().err
    assert listing(bare.folder) == before
    assert run("status", "--interpreter", bare.python) == 0
    printed = capsys.readouterr().out
    assert "has no SGLang" in printed
    assert f"absent in {bare.site}" in printed


def test_an_edited_sglang_is_refused_before_anything_is_written(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(environment.site / "sglang", "srt/models/llama.py", "# one after the other", "# edited")
    before = listing(environment.folder)
    assert run("apply", "--interpreter", environment.python) == 2
    assert f"the source of {LLAMA} differs" in capsys.readouterr().err
    assert listing(environment.folder) == before


def test_verify_sees_that_the_functions_changed_after_the_install(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    run("apply", "--interpreter", environment.python)
    assert run("verify", "--interpreter", environment.python) == 0
    assert f"every byte is in {environment.site}, and the interpreter finds" in capsys.readouterr().out
    edit(environment.site / "sglang", "srt/models/llama.py", "# one after the other", "# edited")
    assert run("verify", "--interpreter", environment.python) == 2
    assert f"the source of {LLAMA} differs" in capsys.readouterr().err


def test_verify_sees_that_another_plugin_comes_first(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("apply", "--interpreter", environment.python)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / MODULE).write_text("another")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    assert run("verify", "--interpreter", environment.python) == 2
    message = capsys.readouterr().err
    assert f"the interpreter {environment.python} finds {tmp_path}/first/{MODULE}" in message
    assert "Is another one on PYTHONPATH" in message


def test_verify_asks_the_interpreter_whether_it_finds_the_entry_point(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("apply", "--interpreter", environment.python)
    seen = environment_module.SEEN.replace("sglang.srt.plugins", "another.group")
    monkeypatch.setattr(environment_module, "SEEN", seen)
    assert run("verify", "--interpreter", environment.python) == 2
    assert "and the entry points []" in capsys.readouterr().err


# Another SGLang, with a proof


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config; its checkpoint has a shape and no weights."""
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 100, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | shape))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    path = tmp_path / "config.yaml"
    values = {
        "name": "test",
        "dataset": {"path": str(tmp_path / "no-dataset-is-needed.jsonl"), "max_seq_len": 8},
        "model": {"path": str(model)},
        "output": {"path": str(tmp_path / "output")},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def unlisted(environment: Environment) -> Environment:
    """An environment whose SGLang the manifest does not list."""
    (environment.site / f"sglang-{VERSION}.dist-info").rename(environment.site / "sglang-0.6.0.dist-info")
    metadata = environment.site / "sglang-0.6.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace(VERSION, "0.6.0"))
    return environment


def probing(monkeypatch: pytest.MonkeyPatch, outcome: ProbeReport | Exception) -> list[tuple[str, bool, State]]:
    """Make the probe pass or fail without a server.

    Returns what it is called with: the interpreter, whether the installed plugin is to be used, and its state then.
    """
    calls = []

    def pretend(config: object, installation: object, model: object, installed: bool) -> ProbeReport:
        site = Path(installation.root).parent  # type: ignore[attr-defined]
        calls.append((installation.interpreter, installed, inspect_site(site).state))  # type: ignore[attr-defined]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(prove, "_probe_server", pretend)
    return calls


def test_an_unlisted_version_is_refused_without_force(
    unlisted: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(unlisted.folder)
    assert run("apply", "--interpreter", unlisted.python) == 2
    message = capsys.readouterr().err
    assert f"SGLang 0.6.0 of {unlisted.python} is not supported: the capture plugin is checked against" in message
    assert "python -m flows patch fingerprint WHEEL" in message
    assert listing(unlisted.folder) == before


def test_a_passed_probe_proves_the_installed_plugin(
    unlisted: Environment, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = probing(monkeypatch, REPORT)
    assert run("apply", "--interpreter", unlisted.python, "--force", str(config)) == 0
    assert calls == [(unlisted.python, True, State.APPLIED)]
    assert "with LlamaForCausalLM" in capsys.readouterr().out
    (proof,) = list_proofs()
    assert (proof.sglang, proof.plugin, proof.model) == ("0.6.0", plugin_version(), "LlamaForCausalLM")
    assert proof.functions == load_manifest().sglang[VERSION]
    assert proof.plugin_files == {path.name: listing(path.parent)[path.name] for path in plugin_modules()}
    assert proof.probe["noise"] == [0.0, 0.1]
    assert run("verify", "--interpreter", unlisted.python) == 0
    assert run("status", "--interpreter", unlisted.python) == 0
    printed = capsys.readouterr().out
    assert f"0.6.0 in {unlisted.site}/sglang, proved on {proof.at[:10]} with LlamaForCausalLM" in printed
    assert f"proof      SGLang 0.6.0 with plugin {plugin_version()}, proved on " in printed


def test_a_failed_probe_takes_the_install_back(
    unlisted: Environment, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(unlisted.folder)
    calls = probing(monkeypatch, ProbeError("the states are wrong"))
    assert run("apply", "--interpreter", unlisted.python, "--force", str(config)) == 1
    assert calls == [(unlisted.python, True, State.APPLIED)]
    assert "ProbeError: the states are wrong" in capsys.readouterr().err
    assert listing(unlisted.folder) == before
    assert list_proofs() == []
    assert run("verify", "--interpreter", unlisted.python) == 2


def test_a_failed_probe_leaves_an_install_that_was_there_before(
    unlisted: Environment, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(unlisted.site)
    before = listing(unlisted.folder)
    probing(monkeypatch, ProbeError("the port is in use"))
    assert run("apply", "--interpreter", unlisted.python, "--force", str(config)) == 1
    assert listing(unlisted.folder) == before


def test_without_an_interpreter_the_configs_is_proved_and_nothing_installed(
    unlisted: Environment, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(config.read_text()) | {"server": {"interpreter": unlisted.python}}
    config.write_text(yaml.safe_dump(values))
    before = listing(unlisted.folder)
    calls = probing(monkeypatch, REPORT)
    assert run("apply", "--force", str(config)) == 0
    assert calls == [(unlisted.python, False, State.ABSENT)]
    assert f"path       {ROOT}/patches/capture" in capsys.readouterr().out
    assert listing(unlisted.folder) == before
    assert [proof.sglang for proof in list_proofs()] == ["0.6.0"]


def test_an_edited_function_needs_a_proof_too(
    environment: Environment, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(environment.site / "sglang", "srt/models/llama.py", "# one after the other", "# edited")
    calls = probing(monkeypatch, REPORT)
    assert run("apply", "--interpreter", environment.python, "--force", str(config)) == 0
    assert len(calls) == 1
    assert run("verify", "--interpreter", environment.python) == 0


def test_what_is_listed_or_proved_is_not_probed_again(
    environment: Environment, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = probing(monkeypatch, ProbeError("must not be called"))
    assert run("apply", "--interpreter", environment.python, "--force", str(config)) == 0
    assert calls == []
    assert list_proofs() == []
    assert inspect_site(environment.site).state is State.APPLIED


def test_a_config_that_is_missing_is_named_before_anything_is_written(
    unlisted: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(unlisted.folder)
    assert run("apply", "--interpreter", unlisted.python, "--force", "/no/config.yaml") == 2
    assert "/no/config.yaml" in capsys.readouterr().err
    assert listing(unlisted.folder) == before


# The next release


def test_a_wheels_line_makes_its_version_supported(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.make_archive(str(tmp_path / "wheel"), "zip", environment.site)
    manifest_path = manifest_module.MANIFEST
    content = json.loads(manifest_path.read_text())
    listed = manifest_line(VERSION, load_manifest().sglang[VERSION])
    manifest_path.write_text(json.dumps(content | {"sglang": {}}))
    assert run("verify", "--interpreter", environment.python) == 2
    capsys.readouterr()
    assert run("fingerprint", str(tmp_path / "wheel.zip")) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{listed}\n"
    assert f"{VERSION}     unlike in every listed version, so read before you list it: " in printed.err
    assert LLAMA in printed.err
    sglang = json.loads(f"{{{printed.out.strip().removesuffix(',')}}}")
    manifest_path.write_text(json.dumps(content | {"sglang": sglang}))
    assert patch.fingerprint([tmp_path / "wheel.zip"]) == ([listed], [])
    assert run("apply", "--interpreter", environment.python) == 0


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fingerprint", str(tmp_path / "missing.whl")) == 2
    assert "missing.whl is no SGLang wheel" in capsys.readouterr().err
