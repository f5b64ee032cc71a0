"""Which SGLang an interpreter has, whether the plugin fits it, what proves it; and who holds a port."""

import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks.config import parse_config
from tasks.errors import SetupError
from tasks.patching import (
    Installation,
    capture_settings,
    check_signatures,
    find_installation,
    plugin_version,
    server_paths,
    supported_versions,
)
from tasks.patching import manifest as manifest_module
from tasks.patching.fingerprint import fingerprint_wheel, fingerprints, signature_of, source_of
from tasks.patching.installation import describe_installation
from tasks.patching.manifest import load_manifest, manifest_line
from tasks.patching.plugin import CAPTURE, plugin_dist_info, plugin_hashes
from tasks.patching.proofs import Proof, find_proof, list_proofs, proofs_folder, write_proof
from tasks.server.ports import check_port, free_port
from tests.unit.helpers import PLUGIN
from tests.unit.pretend_sglang import (
    LLAMA,
    LOGITS,
    QWEN3,
    REGISTER,
    VERSION,
    Environment,
    edit,
    make_environment,
    write_manifest,
    write_sglang,
)

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="this environment has no SGLang")
ASKED_FOR = ["0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"] + [
    f"0.5.{minor}" for minor in range(16, 24)
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretend sglang package; the manifest lists it as it is, and there are no proofs."""
    write_manifest(tmp_path / "manifest.json", tmp_path / "published")
    monkeypatch.setattr(manifest_module, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setenv("DRILLCORE_HOME", str(tmp_path / "state"))
    return write_sglang(tmp_path / "site")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An interpreter with nothing installed."""
    return make_environment(tmp_path / "environment")


def proof_of(root: Path, version: str = VERSION, **changes: Any) -> Proof:
    values: dict[str, Any] = {
        "sglang": version,
        "functions": fingerprints(root, load_manifest()),
        "plugin": plugin_version(),
        "plugin_files": plugin_hashes(),
        "at": "2026-11-29T12:00:00+00:00",
        "model": "LlamaForCausalLM",
        "probe": {"prompts": 13},
    }
    return Proof(**(values | changes))


# Fingerprints


def test_a_signature_is_read_without_its_annotations(root: Path) -> None:
    assert signature_of(root, LOGITS) == (
        "self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, "
        "hidden_states_before_norm=None"
    )
    assert signature_of(root, LOGITS.replace("LogitsProcessor", "Other")) == "self, x"
    assert signature_of(root, REGISTER) == "cls, target, hook, hook_type=HookType.AFTER, *, source=None"


def test_a_source_is_the_functions_text_with_its_decorators_and_comments(root: Path) -> None:
    assert source_of(root, LLAMA) == (
        "    @torch.no_grad()\n    def forward(self, hidden_states):\n        for layer in self.layers:\n"
        "            hidden_states = layer(hidden_states)  # one after the other\n        return hidden_states"
    )


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.models.nothing.LlamaModel.forward",
        "sglang.srt.models.llama.Nothing.forward",
        "sglang.srt.models.llama.LlamaModel.nothing",
        QWEN3,  # inherited, in the parent's file
    ],
)
def test_a_function_that_is_not_there_has_neither(root: Path, target: str) -> None:
    assert signature_of(root, target) is None
    assert source_of(root, target) is None


def test_white_space_at_the_ends_of_lines_does_not_count(root: Path) -> None:
    before = fingerprints(root, load_manifest())
    path = root / "srt/models/llama.py"
    path.write_bytes(path.read_bytes().replace(b"self.layers:", b"self.layers: \t").replace(b"\n", b"\r\n"))
    assert fingerprints(root, load_manifest()) == before


def test_of_a_function_defined_twice_the_last_one_counts(root: Path) -> None:
    edit(root, "srt/models/llama.py", "def other(self): ...", "def forward(self, patched): ...")
    assert source_of(root, LLAMA) == "    def forward(self, patched): ..."


def test_a_file_that_cannot_be_parsed_is_named(root: Path) -> None:
    (root / "srt/models/llama.py").write_text("class LlamaModel\n")
    with pytest.raises(SetupError, match=r"llama\.py cannot be read: expected ':'.*Install SGLang anew"):
        check_signatures(Installation("python", VERSION, root))


# The manifest


def test_the_plugins_version_is_one_wherever_it_stands() -> None:
    assert plugin_version() == PLUGIN.PLUGIN_VERSION
    assert f"\nVersion: {plugin_version()}\n" in (plugin_dist_info() / "METADATA").read_text()


def test_every_function_that_the_plugin_hooks_is_in_the_manifest() -> None:
    hooked = {
        target
        for module in CAPTURE.glob("*.py")
        for target in re.findall(r'"(sglang\.srt\.[\w.]+\.[A-Z]\w+\.\w+)"', module.read_text())
    }
    assert len(hooked) >= 2
    assert hooked <= set(load_manifest().signatures)


def test_every_version_asked_for_is_listed_newest_first_with_all_that_is_hooked() -> None:
    manifest = load_manifest()
    assert supported_versions() == ASKED_FOR[::-1]
    for line in manifest.sglang.values():
        assert all(line[name] for name in manifest.signatures)
        assert all(len(value) == 16 for value in line.values() if value)


def test_a_version_is_one_line_of_the_manifest_as_the_command_prints_it() -> None:
    lines = manifest_module.MANIFEST.read_text().splitlines()
    for version, line in load_manifest().sglang.items():
        assert manifest_line(version, line).removesuffix(",") in [text.removesuffix(",") for text in lines]


@needs_sglang
def test_the_installed_sglang_is_one_that_the_plugin_fits() -> None:
    found = find_installation(None)
    assert found.interpreter == sys.executable
    assert check_signatures(found) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"sglang": ', r"manifest\.json cannot be read: Expecting value"),
        (
            '{"signatures": ["a"], "sources": ["b"], "sglang": {"0.6.0": ["x"]}}',
            r"manifest\.json has 1 fingerprints for SGLang 0\.6\.0 and names 2 functions: .*patch fingerprint WHEEL",
        ),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(SetupError, match=message):
        load_manifest(tmp_path / "manifest.json")


def make_wheel(root: Path) -> Path:
    wheel = root.parent / f"sglang-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in root.parent.rglob("*"):
            if path.is_file() and path != wheel:
                archive.write(path, path.relative_to(root.parent))
    return wheel


def test_a_wheel_has_the_fingerprints_of_what_it_installs(root: Path) -> None:
    assert fingerprint_wheel(make_wheel(root), load_manifest()) == (VERSION, load_manifest().sglang[VERSION])


def test_a_wheel_without_a_hooked_function_is_refused(root: Path) -> None:
    edit(root, "srt/plugins/hook_registry.py", "def register(", "def add(")
    with pytest.raises(SetupError, match=rf"SGLang {VERSION} in .*\.whl has no {REGISTER}: the plugin must be changed"):
        fingerprint_wheel(make_wheel(root), load_manifest())


@pytest.mark.parametrize("name", ["missing.whl", "text.whl"])
def test_what_is_no_wheel_is_named(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(SetupError, match=rf"{name} is no SGLang wheel"):
        fingerprint_wheel(tmp_path / name, load_manifest())


# Checking an SGLang


def test_the_published_functions_pass(root: Path) -> None:
    assert check_signatures(Installation("python", VERSION, root)) is None


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (
            "        input_ids,\n        hidden_states,",
            "        hidden_states,\n        input_ids,",
            "takes (self, hidden_states, input_ids, ",
        ),
        ("aux_hidden_states: Optional", "aux: Optional", "takes (self, input_ids, hidden_states, lm_head, logits_m"),
        ("] = None", "] = ()", "logits_metadata, aux_hidden_states=(), "),
        ("    def forward(\n", "    def forward_all(\n", "is missing"),
    ],
    ids=["order", "name", "default", "gone"],
)
def test_a_changed_signature_is_named(root: Path, old: str, new: str, difference: str) -> None:
    edit(root, "srt/layers/logits_processor.py", old, new)
    with pytest.raises(SetupError) as refused:
        check_signatures(Installation("python", VERSION, root))
    message = str(refused.value)
    assert f"SGLang {VERSION} in {root} is not the published one: {LOGITS} " in message
    assert difference in message
    assert LLAMA not in message


@pytest.mark.parametrize(
    ("name", "old", "new", "difference"),
    [
        ("llama", "        return hid", "        self.dump(1)\n        return hid", f"the source of {LLAMA} differs"),
        ("llama", "@torch.no_grad()", "@captured", f"the source of {LLAMA} differs"),
        ("llama", "def forward(", "def forward_all(", f"{LLAMA} is missing"),
        ("qwen3", "    pass", "    def forward(self): ...", f"{QWEN3} was added"),
    ],
    ids=["line", "decorator", "gone", "added"],
)
def test_an_edited_decoder_loop_is_named(root: Path, name: str, old: str, new: str, difference: str) -> None:
    edit(root, f"srt/models/{name}.py", old, new)
    with pytest.raises(SetupError) as refused:
        check_signatures(Installation("python", VERSION, root))
    message = str(refused.value)
    assert f"SGLang {VERSION} in {root} is not the published one: {difference}. " in message
    assert "Install it anew" in message
    assert "python -m flows patch apply --force CONFIG.yaml" in message


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(SetupError, match=r"The interpreter /no/python cannot be run: .*No such file.*\(server\.interp"):
        find_installation("/no/python")


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("text")
    with pytest.raises(SetupError, match=r"cannot be run: .*Permission denied"):
        find_installation(str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'libpython is missing' >&2\nexit 3", r"python failed \(server\.interpreter\): libpython is missing"),
        ("echo hello", r"python is no Python: it printed 'hello\\n' \(server\.interpreter\)"),
        ("exit 0", r"python is no Python: it printed '' \(server\.interpreter\)"),
    ],
)
def test_an_interpreter_that_fails_is_named_with_what_it_says(tmp_path: Path, script: str, message: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(SetupError, match=message):
        find_installation(str(path))


def test_an_interpreter_without_sglang_is_named_with_what_to_install(environment: Environment) -> None:
    with pytest.raises(
        SetupError, match=rf"interpreter {environment.python} has no SGLang\. Install one of .*0\.5\.23"
    ):
        find_installation(environment.python)


def test_a_folder_of_that_name_is_no_sglang(environment: Environment) -> None:
    (environment.site / "sglang").mkdir()
    with pytest.raises(SetupError, match="has no SGLang"):
        find_installation(environment.python)


def test_a_version_that_the_plugin_was_not_checked_against_is_refused(root: Path, environment: Environment) -> None:
    write_sglang(environment.site, "0.4.1")
    with pytest.raises(SetupError) as refused:
        find_installation(environment.python)
    message = str(refused.value)
    assert (
        f"SGLang 0.4.1 of {environment.python} is not supported: the capture plugin is checked against 0.5" in message
    )
    assert "python -m flows patch fingerprint WHEEL" in message
    assert "python -m flows patch apply --force CONFIG.yaml" in message


def test_a_known_version_is_found_without_importing_it(root: Path, environment: Environment) -> None:
    write_sglang(environment.site)
    found = find_installation(environment.python)
    assert found == Installation(environment.python, VERSION, environment.site / "sglang")


# Proofs


def test_an_unlisted_version_is_accepted_by_its_proof(root: Path, environment: Environment) -> None:
    unlisted = write_sglang(environment.site, "0.6.0")
    proof = proof_of(unlisted, "0.6.0")
    write_proof(proof)
    assert check_signatures(find_installation(environment.python)) == proof
    assert list_proofs() == [proof]


def test_an_edited_function_is_accepted_by_its_proof(root: Path) -> None:
    edit(root, "srt/models/llama.py", "# one after the other", "# edited")
    proof = proof_of(root)
    write_proof(proof)
    assert check_signatures(Installation("python", VERSION, root)) == proof


def test_a_proof_is_for_this_version_only(root: Path) -> None:
    write_proof(proof_of(root, "0.6.0"))
    with pytest.raises(SetupError, match=r"SGLang 0\.6\.1 of python is not supported"):
        check_signatures(Installation("python", "0.6.1", root))


def test_a_proof_is_for_these_functions_only(root: Path) -> None:
    write_proof(proof_of(root, "0.6.0"))
    edit(root, "srt/models/llama.py", "# one after the other", "# edited")
    with pytest.raises(SetupError, match=r"SGLang 0\.6\.0 of python is not supported"):
        check_signatures(Installation("python", "0.6.0", root))


def test_a_proof_is_for_these_bytes_of_the_plugin_only(root: Path) -> None:
    hashes = {name: digest[::-1] for name, digest in plugin_hashes().items()}
    write_proof(proof_of(root, "0.6.0", plugin_files=hashes))
    with pytest.raises(SetupError, match=r"SGLang 0\.6\.0 of python is not supported"):
        check_signatures(Installation("python", "0.6.0", root))


@pytest.mark.parametrize("content", ["{", '{"sglang": "0.6.0"}'])
def test_a_damaged_proof_is_named(root: Path, content: str) -> None:
    path = write_proof(proof_of(root, "0.6.0"))
    path.write_text(content)
    with pytest.raises(SetupError, match=rf"The proof {path} cannot be read: .*Delete it and prove again"):
        check_signatures(Installation("python", "0.6.0", root))


def test_a_proof_whose_content_was_changed_proves_nothing(root: Path) -> None:
    path = write_proof(proof_of(root, "0.6.0"))
    path.write_text(path.read_text().replace('"sglang": "0.6.0"', '"sglang": "0.6.1"'))
    with pytest.raises(SetupError, match=rf"The proof {path} is not what its name says"):
        check_signatures(Installation("python", "0.6.0", root))


def test_proofs_lie_in_the_state_folder(root: Path, tmp_path: Path) -> None:
    path = write_proof(proof_of(root, "0.6.0"))
    assert path.parent == proofs_folder() == tmp_path / "state/patch-proofs"
    assert json.loads(path.read_text())["probe"] == {"prompts": 13}
    assert find_proof("0.6.0", fingerprints(root, load_manifest())) == proof_of(root, "0.6.0")


def test_describing_an_installation_takes_any_version(environment: Environment) -> None:
    write_sglang(environment.site, "9.9")
    assert describe_installation(environment.python).sglang == "9.9"


# What a server is given


def test_the_plugin_takes_the_settings_that_the_server_is_given(tmp_path: Path) -> None:
    values = {
        "name": "test",
        "dataset": {"path": "dataset.jsonl", "max_seq_len": 8},
        "model": {"path": "model"},
        "capture": {"final_norm": "pre"},
        "staging": {"pinned_bytes": 1 << 30},
        "output": {"path": "output"},
    }
    config = parse_config(values, "of the test")
    capture = PLUGIN.Capture(capture_settings(config, tmp_path / "staging", [1, 4]))
    assert (capture.staging, capture.layers) == (tmp_path / "staging", [1, 4])
    assert (capture.final_norm, capture.pinned_bytes) == ("pre", 1 << 30)
    assert capture.staging.is_dir()


def test_the_stand_ins_are_on_the_path_of_a_cpu_server_only() -> None:
    assert [path.name for path in server_paths("cuda")] == ["capture"]
    assert [path.name for path in server_paths("cpu")] == ["capture", "cpu"]
    assert all(path.is_dir() for path in server_paths("cpu"))


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    check_port("127.0.0.1", port, "server.port")
    with socket.create_server(("127.0.0.1", port)):
        assert port >= 1024


def test_two_free_ports_differ_while_one_is_held() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as held:
        assert free_port() != held.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_held_port_is_refused_naming_process_and_field(host: str) -> None:
    program = f"import socket; s = socket.create_server(({host!r}, 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(SetupError) as refused:
            check_port("127.0.0.1", port, "server.port")
        holder.communicate(b"\n")
    message = str(refused.value)
    assert (
        f"Port {port} on 127.0.0.1 cannot be used: process {holder.pid} listens on it ({sys.executable} -c" in message
    )
    assert "End it, or change server.port." in message


def test_a_port_of_this_process_is_refused_too() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        pytest.raises(SetupError, match=f"process {os.getpid()} listens on it"),
    ):
        check_port("127.0.0.1", held.getsockname()[1], "server.port")


def test_an_address_that_this_machine_does_not_have_is_refused_with_the_reason() -> None:
    with pytest.raises(SetupError, match=r"Port 4000 on 192\.0\.2\.1 cannot be used: Cannot assign requested address"):
        check_port("192.0.2.1", 4000, "server.port")
